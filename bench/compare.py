"""Two runs beside each other: the ratio of every figure that both have, with how far it spreads.

A figure is any summary in a result (median, low, high, samples). Figures are met by their place, lists by what their
entries say of themselves (a context, a number of streams) and not by their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.errors import BenchFailed
from bench.stats import Summary

NAMING = ("title", "line", "measurement", "attention", "context", "streams", "tokens")
"""Fields by which one entry of a list is told from another; the first that is there. What may differ between two runs
of the same thing, such as a URL or a model's name, is none."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both runs."""

    name: str
    first: Summary
    second: Summary

    @property
    def ratio(self) -> float:
        """Of the medians; infinite where the second is 0."""
        return self.first.median / self.second.median if self.second.median else float("inf")

    @property
    def low(self) -> float:
        """The least first over the greatest second."""
        return self.first.low / self.second.high if self.second.high else float("inf")

    @property
    def high(self) -> float:
        """The greatest first over the least second."""
        return self.first.high / self.second.low if self.second.low else float("inf")


def read(path: Path) -> dict[str, Any]:
    """What a command wrote with --json.

    Raises:
        BenchFailed: it is nothing of the kind.
    """
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise BenchFailed(f"{path} cannot be read: {exc}") from exc
    if not isinstance(told, dict) or "results" not in told:
        raise BenchFailed(f"{path} was not written by a benchmark's --json")
    return told


def compared(first: dict[str, Any], second: dict[str, Any]) -> list[Compared]:
    """Every figure that both runs have, in the order of the first.

    Raises:
        BenchFailed: there is none.
    """
    ours, others = (dict(_figures(run["results"], "", 0)) for run in (first, second))
    lines = [Compared(name, figure, others[name]) for name, figure in ours.items() if name in others]
    if not lines:
        raise BenchFailed(f"no figure is in both: one is of {first['command']}, the other of {second['command']}")
    return lines


def table(lines: list[Compared], first: str, second: str) -> Table:
    """For people."""
    rows = Table(title=f"{first} over {second}")
    for column in ("figure", first, second, "ratio", "spread"):
        rows.add_column(column, justify="left" if column == "figure" else "right")
    for line in lines:
        rows.add_row(
            line.name,
            *(f"{figure.median:.4g}" for figure in (line.first, line.second)),
            f"{line.ratio:.3f}",
            f"{line.low:.3f}-{line.high:.3f}",
        )
    return rows


def as_json(line: Compared) -> dict[str, Any]:
    """For programs."""
    return {**asdict(line), "ratio": line.ratio, "low": line.low, "high": line.high}


def _figures(node: Any, place: str, index: int) -> Iterator[tuple[str, Summary]]:
    if isinstance(node, list):
        for number, each in enumerate(node):
            if isinstance(each, (dict, list)):
                yield from _figures(each, place, number)
    elif isinstance(node, dict):
        if _is_figure(node):
            yield place, Summary(node["median"], node["low"], node["high"], node["samples"])
            return
        here = _joined(place, _name(node, index))
        for key, each in node.items():
            if isinstance(each, (dict, list)):
                yield from _figures(each, here if key == "summary" else _joined(here, key), 0)


def _is_figure(node: dict[str, Any]) -> bool:
    return {"median", "low", "high", "samples"} <= node.keys()


def _name(node: dict[str, Any], index: int) -> str:
    """What tells this entry from others: the first of NAMING, or its number where it is not the first."""
    for field in NAMING:
        if isinstance(node.get(field), (str, int)):
            return f"{field} {node[field]}"
    return f"#{index}" if index else ""


def _joined(place: str, part: str) -> str:
    return f"{place} {part}".strip() if part else place
