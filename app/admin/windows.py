"""What the last 15 minutes, the last hour and the last day came to, from what was counted by minute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.admin import counting
from app.admin.minutes import quantile
from kvstore.reuse import MissReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MINUTES = {"15m": 15, "1h": 60, "24h": 1440}
STEPS = {"15m": 1, "1h": 1, "24h": 15}
"""Minutes that one point of a plot stands for."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of seconds; None where nothing was seen."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens, turns and seconds of the minutes since `since`; where `is_since_start`, the process is younger."""

    since: float
    is_since_start: bool
    turns: int
    refused: int
    failed: int
    reused: dict[str, int]
    computed: int
    recomputed: int
    reused_share: float | None
    saved_seconds: float
    first_token: dict[str, Spread]
    woken_first_token: Spread
    wakes: Spread
    wakes_within_goal: float | None
    misses: dict[str, int]
    lost: dict[str, int]
    lost_by_us: int
    lost_by_clients: int
    prefetches: dict[str, int]
    published: int
    evicted: int
    displaced: int
    nvme_bytes_written: int
    nvme_bytes_read: int


def window(sums: Mapping[str, float], since: float, is_since_start: bool) -> Window:
    """`sums` are of all columns of app.admin.counting."""
    whole = {name: int(sums[name]) for name in counting.NAMES if name != "saved_seconds"}
    reused = {tier: whole[f"reused_{tier}"] for tier in counting.TIERS}
    lost = {reason.value: whole[f"lost_{reason}"] for reason in (*counting.BY_US, counting.BY_CLIENTS)}
    wakes = [sums[name] for name in counting.WAKE_BUCKETS]
    first = {kind: [sums[name] for name in counting.FIRST_TOKEN_BUCKETS[kind]] for kind in counting.KINDS}
    woken = [sum(counts) for counts in zip(*(first[kind] for kind in counting.WOKEN), strict=True)]
    within = counting.WAKE_BOUNDS.index(counting.WAKE_GOAL_SECONDS) + 1
    return Window(
        since=since,
        is_since_start=is_since_start,
        turns=whole["turns"],
        refused=whole["refused"],
        failed=whole["failed"],
        reused=reused,
        computed=whole["computed"],
        recomputed=whole["recomputed"],
        reused_share=share(sum(reused.values()), sum(reused.values()) + whole["recomputed"]),
        saved_seconds=round(sums["saved_seconds"], 3),
        first_token={kind: spread(counting.LATENCY_BOUNDS, counts) for kind, counts in first.items()},
        woken_first_token=spread(counting.LATENCY_BOUNDS, woken),
        wakes=spread(counting.WAKE_BOUNDS, wakes),
        wakes_within_goal=share(sum(wakes[:within]), sum(wakes)),
        misses={reason.value: whole[f"miss_{reason}"] for reason in MissReason},
        lost=lost,
        lost_by_us=sum(lost[reason.value] for reason in counting.BY_US),
        lost_by_clients=lost[counting.BY_CLIENTS.value],
        prefetches={outcome: whole[f"prefetch_{outcome}"] for outcome in counting.PREFETCHES},
        published=whole["published"],
        evicted=whole["evicted"],
        displaced=whole["displaced"],
        nvme_bytes_written=whole["nvme_bytes_written"],
        nvme_bytes_read=whole["nvme_bytes_read"],
    )


def spread(bounds: tuple[float, ...], counts: Sequence[float]) -> Spread:
    """Of a histogram."""
    quantiles = (quantile(bounds, counts, each) for each in (0.5, 0.95, 0.99))
    p50, p95, p99 = (None if each is None else round(each, 6) for each in quantiles)
    return Spread(int(sum(counts)), p50, p95, p99)


def share(part: float, whole: float) -> float | None:
    """None where there is no whole."""
    return round(part / whole, 6) if whole else None
