"""What the measurements of tiers found: tables for people, parts for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, assert_never

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.report import spread
from bench.stats import p95, summary
from bench.steps import all_seconds
from bench.tiers import decode, many, wake
from bench.tiers.decode import DecodeSamples
from bench.tiers.long import LongSamples
from bench.tiers.many import ManySamples
from bench.tiers.restore import TIERS, RestoreSamples
from bench.tiers.rss import RssSamples
from bench.tiers.wake import WakeSamples

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bench.tiers.choice import Samples
    from bench.tiers.restore import Point
    from bench.tiers.sessions import Continuation

MIB = 1024**2
FAULTS = ("evicted", "loads_failed", "loads_late", "corrupt", "demotions_failed", "demotions_late", "tails_lost")
"""Of the store's totals: each says why something would have to be computed again."""


def table(samples: Samples) -> Group:
    """One measurement for people."""
    match samples:
        case WakeSamples():
            return _wake(samples)
        case RestoreSamples():
            return _restore(samples)
        case DecodeSamples():
            return _decode(samples)
        case RssSamples():
            return _rss(samples)
        case LongSamples():
            return _long(samples)
        case ManySamples():
            return _many(samples)
        case _:
            assert_never(samples)


def part(samples: Samples) -> dict[str, Any]:
    """Every sample and a summary, in plain units."""
    return {**asdict(samples), "summary": _summary(samples)}


def _summary(samples: Samples) -> dict[str, Any]:
    match samples:
        case WakeSamples():
            return {
                "wake_seconds": _times(samples.wake_seconds),
                "bytes_per_second": asdict(summary([samples.bytes / each for each in samples.wake_seconds])),
                "recompute_seconds": asdict(summary(samples.recompute_seconds)),
                "goal_p50_seconds": wake.GOAL_SECONDS if samples.plan.tokens == wake.GOAL_TOKENS else None,
            }
        case RestoreSamples():
            return {
                "raw_bytes_per_second": {tier: asdict(summary(rates)) for tier, rates in samples.raw.items() if rates},
                "points": [_point(point) for point in samples.points],
            }
        case DecodeSamples():
            return {
                "copying_p95_seconds": p95(all_seconds(samples.copying)),
                "quiet_p95_seconds": p95(all_seconds(samples.quiet)),
                "p95_ratio": asdict(samples.ratio()),
                "steps": len(all_seconds(samples.copying)) + len(all_seconds(samples.quiet)),
                "goal_ratio": decode.GOAL,
                "goal_bound": decode.BOUND,
            }
        case RssSamples():
            return {
                "start_bytes": samples.rss_bytes[0],
                "settled_bytes": samples.settled_bytes,
                "end_bytes": samples.rss_bytes[-1],
                "growth_bytes": samples.growth_bytes,
                "slope_bytes_per_cycle": samples.slope_bytes_per_cycle,
                "is_flat": samples.is_flat,
                "stays_within_dram": samples.stays_within_dram,
            }
        case LongSamples():
            return {
                "whole": samples.num_whole,
                "storable_blocks": sum(each.storable_blocks for each in samples.resumed),
                "reused_blocks": sum(each.reused_blocks for each in samples.resumed),
                "cold_ttft_seconds": _times(samples.cold_ttft_seconds),
                "resumed": _split(samples.resumed),
            }
        case ManySamples():
            return {
                "failures": len(samples.failures),
                "storable_blocks": samples.storable_blocks,
                "reused_blocks": samples.reused_blocks,
                "reused_share": samples.reused_share,
                "goal_share": many.GOAL_SHARE,
                "first": _split(samples.first),
                "later": _split(samples.later),
            }
        case _:
            assert_never(samples)


def _wake(samples: WakeSamples) -> Group:
    rows = _columns("", "p50 ms", "p95 ms", "GB/s at p50", "rounds")
    again, seconds = summary(samples.recompute_seconds), summary(samples.wake_seconds)
    rows.add_row(
        "from DRAM to HBM",
        spread(seconds.scaled(1e3)),
        _ms(p95(samples.wake_seconds)),
        f"{samples.bytes / seconds.median / 1e9:.2f}",
        str(seconds.samples),
    )
    rows.add_row("computed again", spread(again.scaled(1e3), 0), "", "", str(again.samples))
    lines = [f"computing it again takes {again.median / seconds.median:,.0f} times as long"]
    if samples.plan.tokens == wake.GOAL_TOKENS:
        lines.append(_verdict("p50", seconds.median * 1e3, wake.GOAL_SECONDS * 1e3, " ms"))
    title = f"wake: a session of {samples.blocks} blocks, {samples.bytes / 1e6:,.1f} MB, nothing else running"
    return _group(title, rows, lines)


def _point(point: Point) -> dict[str, Any]:
    """One length's medians; a tier from which nothing was restored is left out."""
    told: dict[str, Any] = {"tokens": point.tokens, "recompute_seconds": asdict(summary(point.recompute_seconds))}
    for tier in TIERS:
        if seconds := point.restore_seconds[tier]:
            told[f"{tier}_seconds"] = asdict(summary(seconds))
            told[f"{tier}_bytes_per_second"] = asdict(summary([point.bytes / max(each, 1e-9) for each in seconds]))
        if seconds := point.ttft_seconds[tier]:
            told[f"{tier}_ttft_seconds"] = asdict(summary(seconds))
    return told


def _restore(samples: RestoreSamples) -> Group:
    has_ttft = any(point.ttft_seconds[tier] for point in samples.points for tier in TIERS)
    columns = ["tokens", "MB", "computed ms"]
    for tier in TIERS:
        columns += [f"{tier} ms", f"{tier} GB/s", *([f"{tier} TTFT ms"] if has_ttft else [])]
    rows = _columns(*columns)
    for point in samples.points:
        cells = [f"{point.tokens:,}", f"{point.bytes / 1e6:,.1f}"]
        cells.append(spread(summary(point.recompute_seconds).scaled(1e3), 0))
        for tier in TIERS:
            seconds = point.restore_seconds[tier]
            cells.append(spread(summary(seconds).scaled(1e3)) if seconds else "-")
            cells.append(f"{point.bytes / max(summary(seconds).median, 1e-9) / 1e9:.2f}" if seconds else "-")
            if has_ttft:
                ttft = point.ttft_seconds[tier]
                cells.append(spread(summary(ttft).scaled(1e3), 0) if ttft else "-")
        rows.add_row(*cells)
    return _group(f"restore: {samples.title}, one session at a time", rows, _restore_lines(samples))


def _restore_lines(samples: RestoreSamples) -> list[str]:
    lines = list(samples.notes)
    devices = {"dram": "memory copied by one thread", "nvme": "the disk read in the same pieces"}
    for tier, rates in samples.raw.items():
        if not rates:
            continue
        raw = summary(rates).median
        best = [
            point.bytes / summary(point.restore_seconds[tier]).median
            for point in samples.points
            if point.restore_seconds[tier] and min(point.restore_seconds[tier]) > 0
        ]
        share = f"; the best restore has {max(best) / raw:.0%} of that" if best else ""
        lines.append(f"{devices[tier]}: {raw / 1e9:.2f} GB/s{share}")
    declined: Counter[str] = Counter()
    for point in samples.points:
        declined.update(point.declined)
    if declined:
        lines.append("not restored: " + ", ".join(f"{reason} {count}" for reason, count in declined.items()))
    return lines


def _decode(samples: DecodeSamples) -> Group:
    rows = _columns("", "p95 ms", "median ms", "mean interval ms", "steps", "windows")
    for name, windows in (("others copied", samples.copying), ("nothing copied", samples.quiet)):
        seconds = all_seconds(windows)
        rows.add_row(
            name,
            f"{p95(seconds) * 1e3:.2f}",
            f"{summary(seconds).median * 1e3:.2f}",
            spread(summary([window.mean_interval_seconds for window in windows]).scaled(1e3), 2),
            f"{len(seconds):,}",
            str(len(windows)),
        )
    ratio = samples.ratio()
    lines = [_verdict("p95 ratio", ratio.value, decode.GOAL)]
    if len(samples.copying) > 1:
        lines.append(
            f"95% interval {ratio.low:.3f}-{ratio.high:.3f}; {_verdict('its upper end', ratio.high, decode.BOUND)}"
        )
    else:
        lines.append("one pair of windows has no interval")
    seconds_copying = sum(samples.window_seconds)
    rates = (sum(each) / seconds_copying / 1e9 for each in (samples.bytes_out, samples.bytes_in))
    out, back = (f"{rate:.2f} GB/s" for rate in rates)
    lines.append(f"copied out at {out} and back at {back} in {sum(samples.sleeps):,} sleeps, {_pace(samples)}")
    return _group("decode: steps of one stream, with and without copies of other sessions", rows, lines)


def _pace(samples: DecodeSamples) -> str:
    pace = samples.plan.sleeps_per_second
    return f"at most {pace} a second" if pace else "as fast as they go"


def _rss(samples: RssSamples) -> Group:
    plan = samples.plan
    rows = _columns("", "cycle", "RSS MiB")
    for name, index in (("start", 0), ("after a tenth", samples.settled), ("end", -1)):
        rows.add_row(name, f"{samples.cycles[index]:,}", f"{samples.rss_bytes[index] / MIB:,.1f}")
    flat = "flat" if samples.is_flat else "not flat"
    within = "never above" if samples.stays_within_dram else "ABOVE"
    slots, peak = samples.dram_slots, samples.peak_dram_slots
    return _group(
        f"rss: {plan.cycles:,} cycles of sleep and wake, sessions of {plan.blocks} blocks, {samples.seconds:.1f} s",
        rows,
        [
            f"since a tenth {samples.growth_bytes / MIB:+,.2f} MiB, slope {samples.slope_bytes_per_cycle:+,.0f} bytes "
            f"a cycle: {flat}",
            f"{samples.blocks_out:,} blocks copied out, {samples.blocks_in:,} back",
            f"DRAM {within} its {slots} slots ({slots * samples.slot_bytes / MIB:,.1f} MiB): at most {peak} in use, "
            f"highest written {samples.highest_dram_slot}; staging ring apart, {samples.ring_bytes / MIB:,.1f} MiB",
        ],
    )


def _long(samples: LongSamples) -> Group:
    plan, resumed = samples.plan, samples.resumed
    storable, reused = (
        sum(blocks) for blocks in zip(*((e.storable_blocks, e.reused_blocks) for e in resumed), strict=True)
    )
    rows = _split_table({"first turns": samples.cold_ttft_seconds}, resumed)
    dram, nvme = (sum(getattr(each, name) > 0 for each in resumed) for name in ("dram_tokens", "nvme_tokens"))
    return _group(
        f"long: {plan.sessions} sessions of {plan.tokens:,} tokens, {_budgets(samples)}",
        rows,
        [
            f"{samples.num_whole} of {len(resumed)} resumed with only their tail computed again, at least partly "
            f"{nvme} of them from NVMe and {dram} from DRAM; {plan.sessions / plan.hbm_sessions:.1f} times what HBM "
            f"holds",
            f"{reused:,} of {storable:,} storable blocks reused",
            f"first turns {samples.first_seconds:,.1f} s, resumptions {samples.resumed_seconds:,.1f} s",
            _faults(samples.totals),
        ],
    )


def _many(samples: ManySamples) -> Group:
    plan = samples.plan
    lines = [
        f"{len(samples.failures)} failures in {len(samples.first) + len(samples.later) + len(samples.failures)} turns, "
        f"{samples.seconds:,.1f} s",
        *samples.failures[:3],
        f"later turns reused {samples.reused_blocks:,} of {samples.storable_blocks:,} storable blocks: "
        f"{samples.reused_share:.2%}; {'reaches' if samples.reused_share >= many.GOAL_SHARE else 'below'} "
        f"{many.GOAL_SHARE:.1%}",
        f"{samples.totals['turns_suspended']} suspensions; {_faults(samples.totals)}",
    ]
    return _group(
        f"many: {plan.sessions} sessions of {plan.tokens:,} tokens, {plan.turns} turns each, "
        f"{plan.in_flight} in flight, {_budgets(samples)}",
        _split_table({"first turns": [each.ttft_seconds for each in samples.first]}, samples.later),
        lines,
    )


def _split_table(cold: dict[str, list[float]], resumed: Sequence[Continuation]) -> Table:
    """TTFT of first turns, then that of later ones and its three parts."""
    rows = _columns("TTFT", "median ms", "p95 ms", "turns")
    parts = {f"{name}, in all": seconds for name, seconds in cold.items()}
    for part_name in ("ttft", "queue", "wake", "prefill"):
        name = "later turns, in all" if part_name == "ttft" else f"  {part_name}"
        parts[name] = [getattr(each, f"{part_name}_seconds") for each in resumed]
    for name, seconds in parts.items():
        if seconds:
            rows.add_row(name, spread(summary(seconds).scaled(1e3)), _ms(p95(seconds)), str(len(seconds)))
    return rows


def _split(turns: Sequence[Continuation]) -> dict[str, Any]:
    names = ("ttft_seconds", "queue_seconds", "wake_seconds", "prefill_seconds")
    return {name: _times([getattr(each, name) for each in turns]) for name in names} if turns else {}


def _times(seconds: Sequence[float]) -> dict[str, float]:
    return {**asdict(summary(seconds)), "p95": p95(seconds)}


def _faults(totals: dict[str, int]) -> str:
    found = [f"{name.replace('_', ' ')} {totals[name]:,}" for name in FAULTS if totals[name]]
    return f"the store counted: {', '.join(found)}" if found else "the store lost nothing"


def _budgets(samples: LongSamples | ManySamples) -> str:
    plan = samples.plan
    held = [_budget("HBM", plan.hbm_sessions, samples.hbm_slots, samples.slot_bytes)]
    if isinstance(samples, LongSamples) and samples.nvme_slots:
        held.append(_budget("DRAM", samples.plan.dram_sessions, samples.dram_slots, samples.slot_bytes))
        held.append(_budget("NVMe", "all", samples.nvme_slots, samples.slot_bytes))
    else:
        held.append(_budget("DRAM", "all", samples.dram_slots, samples.slot_bytes))
    return ", ".join(held)


def _budget(name: str, sessions: int | str, slots: int, slot_bytes: int) -> str:
    return f"{name} for {sessions} ({slots:,} slots, {slots * slot_bytes / MIB:,.0f} MiB)"


def _verdict(name: str, value: float, goal: float, unit: str = "") -> str:
    digits = 1 if unit else 3
    return f"{name} {value:.{digits}f}{unit}, {'within' if value <= goal else 'above'} {goal:g}{unit}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _columns(*names: str) -> Table:
    rows = Table()
    for name in names:
        rows.add_column(name, justify="left" if name in ("", "TTFT") else "right")
    return rows


def _group(title: str, rows: Table, lines: Sequence[str]) -> Group:
    parts: list[RenderableType] = [Text(title), rows, *(Text(line) for line in lines)]
    return Group(*parts)
