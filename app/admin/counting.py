"""What a turn counts for in the minutes behind `/admin`: names of columns, and the amounts of one turn.

history reused          reused / (reused + recomputed), tokens
seconds saved           reused tokens at the rate of prefill of that moment, minus what the turn waited for its wake
tokens lost by us       had K/V that was evicted, failed, late, expired and so on, and were computed again
tokens lost by clients  the rest of a history that the prompt did not go on from
kind of a next turn     hbm: awake; dram, nvme: woken from there; recomputed: something of its history was not there
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from app.admin.minutes import quantile
from app.metrics import LATENCY_BUCKETS
from app.metrics import WAKE_BUCKETS as WAKE_SECONDS
from kvstore.reuse import MissReason
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.report import Figures, Standing
    from kvstore.reuse import Reuse

# Those of /metrics, so that both tell the same quantiles.
LATENCY_BOUNDS = tuple(map(float, LATENCY_BUCKETS))
WAKE_BOUNDS = tuple(map(float, WAKE_SECONDS))
WAKE_GOAL_SECONDS = 0.1
"""A bound of the above, or the share within it could not be told."""

RECOMPUTED = "recomputed"
KINDS = ("hbm", "dram", "nvme", RECOMPUTED)
WOKEN = ("dram", "nvme")

BEGINNINGS = (MissReason.NEW_SESSION, MissReason.NEW_BRANCH)
NO_LOSS = (*BEGINNINGS, MissReason.CACHE_DISABLED, MissReason.RECOMPUTE_CHEAPER)
BY_CLIENTS = MissReason.PROMPT_DIVERGED
BY_US = tuple(reason for reason in MissReason if reason not in NO_LOSS and reason is not BY_CLIENTS)

TIERS = tuple(tier.name.lower() for tier in Tier)
STORE_TOTALS = ("published", "evicted", "displaced", "nvme_bytes_written", "nvme_bytes_read")
"""Of kvstore.snapshot.Totals: what each minute added to them."""
PREFETCHES = ("useful", "late", "wasted")


def buckets(name: str, bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Columns of a histogram."""
    return tuple(f"{name}_{index}" for index in range(len(bounds) + 1))


WAKE_BUCKETS = buckets("wake", WAKE_BOUNDS)
FIRST_TOKEN_BUCKETS = {kind: buckets(f"first_token_{kind}", LATENCY_BOUNDS) for kind in KINDS}

NAMES = (
    *("turns", "refused", "failed", "computed", "recomputed", "saved_seconds", "wakes"),
    *(f"reused_{tier}" for tier in TIERS),
    *(f"miss_{reason}" for reason in MissReason),
    *(f"lost_{reason}" for reason in (*BY_US, BY_CLIENTS)),
    *(f"prefetch_{outcome}" for outcome in PREFETCHES),
    *STORE_TOTALS,
    *WAKE_BUCKETS,
    *(name for kind in KINDS for name in FIRST_TOKEN_BUCKETS[kind]),
)


def turn_amounts(
    outcome: str, standing: Standing, figures: Figures, reuse: Reuse, prefill_tokens_per_second: float
) -> dict[str, float]:
    """What a turn that has ended adds to its minute."""
    if not figures.ran:
        return {"refused": 1.0 if outcome == "queue_full" else 0.0}
    amounts: dict[str, float] = {
        "turns": 1.0,
        "failed": 1.0 if outcome == "failed" else 0.0,
        "computed": reuse.computed,
        "recomputed": reuse.recomputed,
        **{f"reused_{tier.name.lower()}": tokens for tier, tokens in figures.reused.items()},
    }
    if prefill_tokens_per_second > 0 and figures.reused_tokens:
        amounts["saved_seconds"] = figures.reused_tokens / prefill_tokens_per_second - figures.wake_seconds
    if reuse.miss_reason is not None:
        amounts[f"miss_{reuse.miss_reason}"] = 1.0
        if lost := lost_tokens(standing, reuse):
            amounts[f"lost_{reuse.miss_reason}"] = lost
    if figures.wake_trigger is not None:
        amounts["wakes"] = 1.0
        amounts[WAKE_BUCKETS[bisect_left(WAKE_BOUNDS, figures.wake_seconds)]] = 1.0
    kind = kind_of(figures, reuse)
    if kind is not None and figures.first_token_at is not None:
        amounts[FIRST_TOKEN_BUCKETS[kind][bisect_left(LATENCY_BOUNDS, figures.first_token_at)]] = 1.0
    return amounts


def kind_of(figures: Figures, reuse: Reuse) -> str | None:
    """What a next turn found of its history; None for a first one."""
    if reuse.miss_reason in (*BEGINNINGS, MissReason.CACHE_DISABLED):
        return None
    if reuse.miss_reason is not None:
        return RECOMPUTED
    deepest = max((tier for tier, tokens in figures.reused.items() if tokens), default=Tier.HBM)
    return deepest.name.lower()


def lost_tokens(standing: Standing, reuse: Reuse) -> int:
    """Tokens that a turn computed, or whose history it left behind, for its miss reason; 0 where that is no loss."""
    if reuse.miss_reason is None or reuse.miss_reason in NO_LOSS:
        return 0
    if reuse.miss_reason is BY_CLIENTS:
        return max(0, standing.history_tokens - 1 - standing.shared_tokens)
    # A session that is gone as a whole left nothing to compare with: its prompt is nearly all history.
    return reuse.recomputed if standing.history_tokens else reuse.computed


def p50(counts: tuple[float, ...]) -> float | None:
    """Of first tokens, by bucket; seconds."""
    found = quantile(LATENCY_BOUNDS, counts, 0.5)
    return None if found is None else round(found, 6)
