"""How we stand against peers: a table for people, parts for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.peers import lines as all_lines
from bench.report import spread
from bench.stats import Summary, summary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.peers.against import AgainstSamples
    from bench.peers.lines import Line
    from bench.peers.recipes import Recipe


def table(samples: AgainstSamples, recipes: Sequence[Recipe]) -> Group:
    """One row a line; then ours against each peer that there is a bar for."""
    rows = Table()
    rows.add_column("line")
    for recipe in recipes:
        rows.add_column(recipe.name, justify="right")
    for line in all_lines.of(list(samples.plan.groups)):
        taken = samples.taken.get(line.name, {})
        cells = [_shown(taken.get(recipe.name, []), line) for recipe in recipes]
        rows.add_row(f"{line.name}, {line.unit}", *cells)
    ratios = Table()
    for column in ("line", "ours", "peer", "ratio", "spread", "floor", "goal", ""):
        ratios.add_column(column, justify="left" if column in ("line", "ours", "peer", "") else "right")
    for each in verdicts(samples, recipes):
        ratios.add_row(
            *(each["line"], each["ours"], each["peer"]),
            *(f"{each[name]:.2f}" for name in ("ratio",)),
            f"{each['low']:.2f}-{each['high']:.2f}",
            *(f"{each[name]:g}x" for name in ("floor", "goal")),
            each["verdict"],
        )
    ready = [f"{name} ready after {spread(summary(seconds))} s" for name, seconds in samples.ready_seconds.items()]
    return Group(rows, ratios, *(Text(line) for line in [*ready, *samples.failures]))


def part(samples: AgainstSamples, recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """A result for each line, with every sample, and one for the verdicts."""
    results: list[dict[str, Any]] = [
        {
            "line": line,
            "servers": [
                {"title": server, "samples": values, "summary": asdict(summary(values))}
                for server, values in taken.items()
            ],
        }
        for line, taken in samples.taken.items()
    ]
    return [*results, {**asdict(samples.plan), "failures": samples.failures, "verdicts": [*verdicts(samples, recipes)]}]


def verdicts(samples: AgainstSamples, recipes: Sequence[Recipe]) -> Iterator[dict[str, Any]]:
    """Each of ours against each peer that a line has bars for."""
    peers = [recipe for recipe in recipes if not recipe.is_ours]
    for line in all_lines.of(list(samples.plan.groups)):
        taken = samples.taken.get(line.name, {})
        for kind, bars in line.bars.items():
            candidates = [peer for peer in peers if peer.name in taken and kind in (peer.kind, "better")]
            if not candidates:
                continue
            best = max if line.is_more_better else min
            peer = best(candidates, key=lambda peer: summary(taken[peer.name]).median)
            for recipe in recipes:
                if recipe.is_ours and recipe.name in taken:
                    yield _verdict(line, recipe.name, peer.name, taken, bars)


def _verdict(line: Line, ours: str, peer: str, taken: dict[str, list[float]], bars: all_lines.Bars) -> dict[str, Any]:
    above, below = summary(taken[ours]), summary(taken[peer])
    if line.is_faster:
        above, below = below, above
    ratio = _ratio(above, below)
    wants_more = line.is_more_better or line.is_faster

    def reaches(bar: float) -> bool:
        return ratio["ratio"] >= bar if wants_more else ratio["ratio"] <= bar

    verdict = "goal" if reaches(bars.goal) else "floor" if reaches(bars.floor) else "below the floor"
    return {"line": line.name, "ours": ours, "peer": peer, **ratio, **asdict(bars), "verdict": verdict}


def _ratio(above: Summary, below: Summary) -> dict[str, float]:
    return {
        "ratio": above.median / below.median,
        "low": above.low / below.high,
        "high": above.high / below.low,
    }


def _shown(values: Sequence[float], line: Line) -> str:
    return spread(summary(values).scaled(line.factor)) if values else "-"
