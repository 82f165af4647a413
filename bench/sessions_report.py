"""What `bench sessions` found: a table for people, a part for JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.sessions import GOAL_SHARE
from bench.stats import p95, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.sessions import SessionsSamples, SessionTurn

PARTS = ("ttft", "queue", "wake", "prefill", "other")


def table(samples: SessionsSamples) -> Group:
    """One run for people."""
    plan = samples.plan
    rows = Table()
    for name in ("turns", *(f"{part} ms" for part in PARTS), "TTFT p95 ms", "n"):
        rows.add_column(name, justify="left" if name == "turns" else "right")
    for name, turns in _groups(samples).items():
        rows.add_row(
            name,
            # Medians only: with their ranges the rows would not fit a terminal. JSON has every turn.
            *(_median_ms(turns, part) for part in PARTS),
            f"{p95(_seconds(turns, 'ttft')) * 1e3:,.0f}",
            f"{len(turns):,}",
        )
    title = (
        f"{samples.model}, {samples.title}: {plan.sessions:,} sessions, {plan.turns} turns each in random order, "
        f"{plan.in_flight} in flight"
    )
    return Group(Text(title), rows, *(Text(line) for line in _lines(samples)))


def part(samples: SessionsSamples) -> dict[str, Any]:
    """Every turn, and what they come to."""
    return {
        **asdict(samples),
        "summary": {
            "failures": len(samples.failures),
            "not_begun": samples.not_begun,
            "storable_blocks": samples.storable_blocks,
            "reused_blocks": samples.reused_blocks,
            "reused_share": samples.reused_share,
            "goal_share": GOAL_SHARE,
            "reaches_goal": samples.reaches_goal,
            "misses": _misses(samples),
            "by_tier": {
                name: {
                    f"{each}_seconds": {**asdict(summary(seconds)), "p95": p95(seconds)}
                    for each in PARTS
                    if (seconds := _seconds(turns, each))
                }
                for name, turns in _groups(samples).items()
            },
        },
    }


def _lines(samples: SessionsSamples) -> list[str]:
    plan, share = samples.plan, samples.reused_share
    turns = len(samples.turns) + len(samples.failures)
    lines = [f"{len(samples.failures)} failures in {turns:,} turns, {samples.seconds:,.1f} s", *samples.failures[:3]]
    if samples.not_begun:
        lines.append(f"stopped after {plan.max_seconds:,.0f} s: {samples.not_begun:,} turns were not begun")
    if share is not None:
        lines.append(
            f"later turns reused {samples.reused_blocks:,} of {samples.storable_blocks:,} storable "
            f"{'blocks' if samples.block_tokens > 1 else 'tokens'}: {share:.2%}"
            f", {'reaches' if share >= GOAL_SHARE else 'below'} {GOAL_SHARE:.1%}"
        )
    if misses := _misses(samples):
        lines.append("missed: " + ", ".join(f"{reason} {count:,}" for reason, count in misses.items()))
    if samples.turns:
        longest = max(turn.history_tokens for turn in samples.turns)
        lines.append(f"histories of up to {longest:,} tokens before a turn")
    return lines


def _misses(samples: SessionsSamples) -> dict[str, int]:
    """Of later turns, by the reason that the server gave."""
    return dict(Counter(turn.miss_reason for turn in samples.later if turn.miss_reason).most_common())


def _groups(samples: SessionsSamples) -> dict[str, list[SessionTurn]]:
    """First turns, then later ones by the tier that they woke from; none is empty."""
    groups = {"first": [turn for turn in samples.turns if turn.number == 1]}
    later = samples.later
    for tier in ("nvme", "dram"):
        groups[f"woke from {tier}"] = [turn for turn in later if turn.woke_from == tier]
    awake = [turn for turn in later if turn.woke_from not in ("nvme", "dram")]
    reused = "all in hbm" if samples.block_tokens > 1 else "some cached"
    groups[reused] = [turn for turn in awake if turn.reused_blocks]
    groups["computed again" if samples.reused_share is not None else "later"] = [
        turn for turn in awake if not turn.reused_blocks
    ]
    return {name: turns for name, turns in groups.items() if turns}


def _seconds(turns: Sequence[SessionTurn], part: str) -> list[float]:
    """Of those that were told."""
    return [seconds for turn in turns if (seconds := getattr(turn, f"{part}_seconds")) is not None]


def _median_ms(turns: Sequence[SessionTurn], part: str) -> str:
    seconds = _seconds(turns, part)
    return f"{summary(seconds).median * 1e3:,.0f}" if seconds else "not told"
