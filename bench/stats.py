"""Medians with their spread, and a ratio of tails with its interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
COVERED = 0.95
"""Share of resampled ratios that lie within an interval."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A median, and how far single samples lie from it."""

    median: float
    low: float
    high: float
    samples: int

    def scaled(self, factor: float) -> Summary:
        """The same in another unit."""
        return Summary(self.median * factor, self.low * factor, self.high * factor, self.samples)


def summary(values: Sequence[float]) -> Summary:
    """Median, least and most of at least one value."""
    return Summary(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Ratio:
    """p95 of one condition over p95 of the other, and the bootstrap's interval of it."""

    value: float
    low: float
    high: float


def p95(values: Sequence[float]) -> float:
    """The value that one in twenty exceeds."""
    return float(np.percentile(values, 95))


def p95_ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int) -> Ratio:
    """p95 over all first members to p95 over all second ones.

    Pairs of windows are drawn again, not steps: steps of one window share its moment on the machine, and to take them
    for independent would make the interval too narrow.
    """
    random = np.random.default_rng(seed)
    draws = random.integers(len(pairs), size=(RESAMPLES, len(pairs)))
    ratios = [_pooled([pairs[index] for index in draw]) for draw in draws]
    tail = (1 - COVERED) / 2 * 100
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Ratio(_pooled(pairs), float(low), float(high))


def _pooled(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    ours, others = zip(*pairs, strict=True)
    return p95(np.concatenate(ours)) / p95(np.concatenate(others))  # type: ignore[arg-type]
