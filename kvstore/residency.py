"""Where every block is: rows and pools kept consistent, and which tiers can be trusted (pure).

Copies are asked for and dropped here; how they come to be is `Traffic`. A copy that did not
verify is condemned: nobody reads it again, and it is dropped as soon as nothing pins it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cleaner import Cleaner
from kvstore.events import TierHealth
from kvstore.pool import Pool
from kvstore.rows import Rows
from kvstore.snapshot import Totals
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.config import PlannerConfig
    from kvstore.events import Miss


class Residency:
    """Rows, pools and counters of the store. `misses` are the rows whose load failed since it was cleared."""

    def __init__(self, config: PlannerConfig) -> None:
        capacities = (config.hbm_slots, config.dram_slots, config.nvme_slots)
        tiers = 3 if config.nvme_slots else 2 if config.dram_slots else 1
        self.rows = Rows(tiers)
        self.pools = tuple(Pool(tier, capacities[tier], self.rows) for tier in Tier if tier < tiers)
        self.hbm = self.pools[Tier.HBM]
        self.cleaner = Cleaner()
        self.totals = Totals()
        self.misses: dict[int, Miss] = {}
        self.num_faults = 0  # changes whenever a block that was on its way, or could be read, may not be any more
        self._backoff_seconds = config.tier_backoff_seconds
        self._health = [TierHealth.OK] * tiers
        self._retry_at = [0.0] * tiers
        self._condemned: dict[tuple[Tier, int], bool] = {}  # True: retire the slot as well

    # --- asking -----------------------------------------------------------------------

    def has_tier(self, tier: Tier) -> bool:
        return tier < len(self.pools) and self.pools[tier].capacity > 0

    def source_of(self, row: int) -> Tier | None:
        """The nearest tier below HBM that `row` can be read from."""
        for pool in self.pools[1:]:
            if pool.is_valid(row) and self._is_readable(pool.tier, row):
                return pool.tier
        return None

    def is_rising(self, row: int) -> bool:
        """Is `row` on its way from a lower tier into DRAM?"""
        return len(self.pools) > 1 and self.pools[Tier.DRAM].is_filling(row) and self.source_of(row) is Tier.NVME

    def can_come(self, row: int) -> bool:
        """Is `row`, absent in HBM, on its way there or readable below?"""
        return self.hbm.is_filling(row) or self.source_of(row) is not None or self.is_rising(row)

    def has_copy_below(self, tier: Tier, row: int) -> bool:
        """Can `row` be read from a tier below `tier`?"""
        for below in range(tier + 1, len(self.pools)):
            if self.pools[below].is_valid(row) and self._is_readable(Tier(below), row):
                return True
        return False

    def is_below(self, row: int) -> bool:
        """Is `row` anywhere below HBM, readable or not, or on its way there?"""
        for pool in self.pools[1:]:  # noqa: SIM110 - asked of every block that leaves; a generator costs three times that
            if pool.is_present(row):
                return True
        return False

    def takes(self, tier: Tier) -> bool:
        """Does it make sense to copy anything down into `tier`?"""
        if not self.has_tier(tier):
            return False
        return self._health[tier] is TierHealth.OK and self._retry_at[tier] <= self.rows.now

    def _is_readable(self, tier: Tier, row: int) -> bool:
        return self._health[tier] is not TierHealth.OFF and (tier, row) not in self._condemned

    # --- trust ------------------------------------------------------------------------

    def set_health(self, tier: Tier, health: TierHealth) -> None:
        self._health[tier] = health
        self.num_faults += 1
        if health is TierHealth.OK:
            self._retry_at[tier] = 0.0

    def distrust(self, tier: Tier) -> None:
        """`tier` did not take a block, or not in time: it gets no more for a while."""
        self._retry_at[tier] = self.rows.now + self._backoff_seconds

    def condemn(self, tier: Tier, row: int, retire: bool) -> None:
        """The copy of `row` in `tier` is not to be read again; `retire` its slot when it goes."""
        if self.pools[tier].is_valid(row):
            self.num_faults += 1
            self._condemned[tier, row] = retire or self._condemned.get((tier, row), False)

    def sweep(self) -> None:
        """Drop condemned copies that nothing pins any more."""
        for tier, row in list(self._condemned):
            if not self.pools[tier].is_held(row):
                self.drop(tier, row)

    # --- rows -------------------------------------------------------------------------

    def publish(self, row: int, slot: int) -> None:
        """The OPEN HBM `slot` holds the block of `row`, which is not VALID in HBM."""
        if self.hbm.is_filling(row):
            self.hbm.overtake(row, slot)
            self.totals.overtaken += 1
        else:
            self.hbm.publish(row, slot)
        self.rows.origin[row] = Tier.HBM
        self.refresh_below(row)
        self.totals.published += 1

    def drop(self, tier: Tier, row: int) -> None:
        """Free the VALID copy of `row` in `tier`."""
        if tier is Tier.HBM:
            self.cleaner.leave(row, self.rows.parent[row])
        pool = self.pools[tier]
        slot = pool.slot(row)
        pool.drop(row)
        if self._condemned and self._condemned.pop((tier, row), False):
            pool.retire(slot)
        self.rows.forget_unused(row)

    def reopen(self, row: int) -> int:
        """Make the HBM copy of `row` private again to the turn that attends to it; its slot."""
        self.cleaner.leave(row, self.rows.parent[row])
        slot = self.hbm.reopen(row)
        self.rows.forget_unused(row)
        return slot

    def unpin(self, tier: Tier, row: int) -> None:
        self.pools[tier].unpin(row)
        self.rows.forget_unused(row)

    def flush(self) -> None:
        """Drop every copy that nothing needs."""
        for pool in self.pools:
            self.totals.flushed += pool.evictable
            for _ in range(pool.evictable):
                self.drop(pool.tier, pool.frontier.coldest())

    def refresh(self, row: int) -> None:
        """`row` became less worth keeping."""
        for pool in self.pools:
            pool.refresh(row)

    def refresh_below(self, row: int) -> None:
        """What is VALID in HBM is a duplicate below, and goes first there."""
        for pool in self.pools[1:]:
            pool.refresh(row)
