"""What the planner shows of itself: frozen counters, no lists (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import Tier


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Slots of one tier by state; they add up to `capacity`. `pinned` blocks are the VALID ones that may not leave."""

    tier: Tier
    capacity: int
    free: int
    open: int
    filling: int
    valid: int
    quarantined: int
    pinned: int


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """`waiting` have not run yet, `suspended` wait to go on, `granted` hold slots, `stopping` ones among them."""

    waiting: int
    suspended: int
    granted: int
    stopping: int


@dataclass(slots=True)
class Totals:
    """Counted since the start: blocks, unless the name says otherwise. A snapshot holds a copy."""

    turns_arrived: int = 0
    turns_granted: int = 0
    turns_resumed: int = 0
    turns_suspended: int = 0
    turns_refused_queue_full: int = 0
    turns_refused_never_fits: int = 0
    turns_cancelled_waiting: int = 0
    growths_refused: int = 0
    published: int = 0
    duplicate_fills: int = 0
    reused: int = 0
    evicted: int = 0
    flushed: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The planner's state in numbers, as of its last event."""

    tiers: tuple[TierCounts, ...]
    turns: TurnCounts
    totals: Totals

    def tier(self, tier: Tier) -> TierCounts:
        """The counts of `tier`, which must exist here."""
        return self.tiers[tier]
