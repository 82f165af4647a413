"""What the planner shows of itself: frozen counters, no lists (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.events import TierHealth, WritePolicy

if TYPE_CHECKING:
    from kvstore.types import Tier


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Slots of one tier by state; they add up to `capacity`. `pinned` blocks are the VALID ones that may not leave.

    `erasing` slots of NVMe hold bytes that have to go before they are used again.
    """

    tier: Tier
    capacity: int
    free: int
    open: int
    filling: int
    valid: int
    quarantined: int
    pinned: int
    erasing: int = 0
    health: TierHealth = TierHealth.OK
    read_blocks_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """`waiting` have not run yet, `suspended` wait to go on; `granted` hold slots, `waking` and `stopping` among them.

    A `waking` turn waits for its blocks, or for room that is on its way.
    """

    waiting: int
    suspended: int
    granted: int
    stopping: int
    waking: int = 0


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
    evicted: int = 0  # last copies that made room
    displaced: int = 0  # copies on NVMe that made room there and stayed above
    released: int = 0  # HBM copies that made room and stayed below
    flushed: int = 0
    closed: int = 0
    loaded: int = 0
    demoted: int = 0
    cleaned: int = 0
    sunk: int = 0  # copied to NVMe ahead of need, or to be there after a restart
    found: int = 0  # on NVMe from an earlier process
    erased: int = 0  # slots of NVMe whose bytes had to go
    dram_blocks_written: int = 0
    dram_bytes_written: int = 0
    nvme_blocks_written: int = 0
    nvme_bytes_written: int = 0
    nvme_blocks_read: int = 0
    nvme_bytes_read: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    corrupt: int = 0
    stale: int = 0  # copies whose slot held another block
    demotions_failed: int = 0
    demotions_late: int = 0
    overtaken: int = 0  # loads that a turn's own fill made superfluous
    tails_kept: int = 0
    tails_lost: int = 0
    hints: int = 0
    hints_declined: int = 0
    predictions: int = 0  # branches woken because their next turn was expected
    predictions_used: int = 0
    recomputes_cheaper: int = 0  # turns that computed what could have been loaded


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The planner's state in numbers, as of its last event."""

    tiers: tuple[TierCounts, ...]
    turns: TurnCounts
    totals: Totals
    transfers: int = 0
    hints: int = 0
    dirty_blocks: int = 0
    """In HBM or DRAM, wanted on NVMe by a branch that ended there, and not there."""
    sinking_blocks: int = 0
    """Of those, the ones that are to be copied now, and on their way."""
    nvme_write_policy: WritePolicy = WritePolicy.EVERY_TURN
    """What AUTO has become, or the one that was set."""
    nvme_bytes_last_day: int = 0
    prefill_tokens_per_second: float = 0.0

    def tier(self, tier: Tier) -> TierCounts:
        """The counts of `tier`, which must exist here."""
        return self.tiers[tier]
