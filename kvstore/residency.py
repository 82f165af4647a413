"""Where every block is: rows and pools kept consistent, and which tiers can be trusted (pure).

Copies are asked for and dropped here; how they come to be is `Traffic`. A copy that did not
verify is condemned: nobody reads it again, and it is dropped as soon as nothing pins it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.blames import Blames
from kvstore.budget import WriteBudget
from kvstore.cleaner import Cleaner
from kvstore.cost import Cost
from kvstore.dirty import Dirty
from kvstore.events import RecordedBlock
from kvstore.health import Health
from kvstore.ledger import Ledger
from kvstore.pool import Pool
from kvstore.rows import NO_ROW, Rows
from kvstore.snapshot import Totals
from kvstore.tips import Tips
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.config import PlannerConfig
    from kvstore.events import Action, Miss, TierHealth
    from kvstore.types import BlockKey


class Residency:
    """Rows, pools and counters of the store. `misses` are the rows whose load failed since it was cleared."""

    def __init__(self, config: PlannerConfig, emit: Callable[[Action], None]) -> None:
        capacities = (config.hbm_slots, config.dram_slots, config.nvme_slots)
        tiers = 3 if config.nvme_slots else 2 if config.dram_slots else 1
        self.rows = Rows(tiers)
        self.pools = tuple(Pool(tier, capacities[tier], self.rows) for tier in Tier if tier < tiers)
        self.hbm, self.below = self.pools[Tier.HBM], self.pools[1:]
        self.cleaner = Cleaner(self.rows)
        self.totals = Totals()
        self.misses: dict[int, Miss] = {}
        self.blames = Blames()
        self.num_faults = 0  # changes whenever a block that was on its way, or could be read, may not be any more
        self.dirty = Dirty(self.rows)
        self.tips = Tips(self.rows, self.dirty)
        self.ledger = Ledger(emit)
        self.health = Health(config, tiers, emit)
        self.cost = Cost(config)
        self.budget = WriteBudget(config.nvme_rated_bytes_per_day)
        self._slot_bytes = config.slot_bytes
        self._has_nvme = tiers > Tier.NVME
        self.revoked: dict[BlockKey, None] = {}  # no branch lets these lie on NVMe, and there they are still
        self._condemned: dict[tuple[Tier, int], bool] = {}  # True: retire the slot as well

    # --- asking -----------------------------------------------------------------------

    def has_tier(self, tier: Tier) -> bool:
        return tier < len(self.pools) and self.pools[tier].capacity > 0

    def source_of(self, row: int) -> Tier | None:
        """The nearest tier below HBM that `row` can be read from."""
        for pool in self.below:
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
        for pool in self.below:  # noqa: SIM110 - asked of every block that leaves; a generator costs three times that
            if pool.is_present(row):
                return True
        return False

    def takes(self, tier: Tier) -> bool:
        """Does it make sense to copy anything down into `tier`?"""
        if not self.has_tier(tier):
            return False
        return self.health.takes(tier, self.rows.now)

    def is_unreadable(self, row: int) -> bool:
        """Is `row` in a lower tier, and not to be read from any?"""
        return self.source_of(row) is None and any(pool.is_valid(row) for pool in self.below)

    def may_sink(self, row: int) -> bool:
        """May `row` be copied to NVMe, and does it make sense?"""
        return self.rows.disk[row] > 0 and self.takes(Tier.NVME) and not self.pools[Tier.NVME].is_present(row)

    def can_read(self, tier: Tier, row: int) -> bool:
        """Is `row` VALID in `tier` and to be had from there?"""
        return tier < len(self.pools) and self.pools[tier].is_valid(row) and self._is_readable(tier, row)

    def is_only_in(self, tier: Tier, row: int) -> bool:
        """Has no other tier a VALID copy of `row`?"""
        return not any(pool.is_valid(row) for pool in self.pools if pool.tier is not tier)

    def _is_readable(self, tier: Tier, row: int) -> bool:
        return self.health.is_readable(tier) and not (self._condemned and (tier, row) in self._condemned)

    # --- trust ------------------------------------------------------------------------

    def set_health(self, tier: Tier, health: TierHealth) -> None:
        self.health.set(tier, health, self.rows.now)
        self.num_faults += 1

    def distrust(self, tier: Tier) -> None:
        """`tier` did not take a block, or not in time, or could not read one: it gets no more for a while."""
        self.health.distrust(tier, self.rows.now)

    def note_late_read(self, tier: Tier) -> None:
        """A read of `tier` is past its deadline."""
        if self.health.note_late_read(tier, self.rows.now):
            self.num_faults += 1

    def condemn(self, tier: Tier, row: int, why: Miss, retire: bool) -> None:
        """The copy of `row` in `tier` is not to be read again; `retire` its slot when it goes."""
        if self.pools[tier].is_valid(row):
            self.blames.note(self.rows.key(row), why)
            self.num_faults += 1
            self._condemned[tier, row] = retire or self._condemned.get((tier, row), False)

    def _clear_blame(self, row: int) -> None:
        if self.blames:
            self.blames.clear(self.rows.key(row))

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
        self._clear_blame(row)
        self.refresh_below(row)
        if self._has_nvme:
            self.dirty.note(row)
        self.totals.published += 1

    def arrive(self, tier: Tier, row: int) -> None:
        """A transfer has brought `row` to `tier`."""
        self.pools[tier].finish_fill(row)
        self._clear_blame(row)
        if self._has_nvme:
            self.dirty.note(row)

    def drop(self, tier: Tier, row: int, erase: bool = False) -> None:
        """Free the VALID copy of `row` in `tier`; with `erase`, its slot of NVMe once its bytes are gone."""
        if tier is Tier.HBM:
            self.cleaner.leave(row, self.rows.parent[row])
        pool = self.pools[tier]
        slot = pool.slot(row)
        is_broken = bool(self._condemned) and self._condemned.pop((tier, row), False)
        if tier is Tier.NVME:
            self._drop_from_nvme(row, slot, erase and not is_broken)
        else:
            pool.drop(row)
        if is_broken:
            pool.retire(slot)
            if tier is Tier.NVME:
                self.ledger.overwrite((slot,))
        if self._has_nvme:
            self.dirty.note(row)
        self.rows.forget_unused(row)

    def _drop_from_nvme(self, row: int, slot: int, erase: bool) -> None:
        if erase:
            self.pools[Tier.NVME].drop_to_erase(row)
            self.ledger.erase(slot)
            self.totals.erased += 1
        else:
            self.pools[Tier.NVME].drop(row)
            self.ledger.forget(slot)
            self.ledger.leave(slot, self.rows.key(row))

    def reopen(self, row: int) -> int:
        """Make the HBM copy of `row` private again to the turn that attends to it; its slot."""
        self.cleaner.leave(row, self.rows.parent[row])
        slot = self.hbm.reopen(row)
        if self._has_nvme:
            self.dirty.note(row)
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
                self.drop(pool.tier, pool.shares.coldest())

    def refresh(self, row: int) -> None:
        """`row` became less worth keeping."""
        for pool in self.pools:
            pool.refresh(row)

    def refresh_below(self, row: int) -> None:
        """What is VALID in HBM is a duplicate below, and goes first there."""
        for pool in self.below:
            pool.refresh(row)

    # --- counting ---------------------------------------------------------------------

    def count_written(self, tier: Tier, blocks: int) -> None:
        """So many blocks have come down to `tier`."""
        totals, num_bytes = self.totals, blocks * self._slot_bytes
        if tier is Tier.DRAM:
            totals.dram_blocks_written += blocks
            totals.dram_bytes_written += num_bytes
        elif tier is Tier.NVME:
            totals.nvme_blocks_written += blocks
            totals.nvme_bytes_written += num_bytes
            self.budget.note(num_bytes, self.rows.now)

    def count_read(self, tier: Tier, blocks: int) -> None:
        """So many blocks have come up from `tier`."""
        if tier is Tier.NVME:
            self.totals.nvme_blocks_read += blocks
            self.totals.nvme_bytes_read += blocks * self._slot_bytes

    # --- NVMe's slots -----------------------------------------------------------------

    def record(self, rows: Sequence[int]) -> None:
        """The transfer that wrote `rows` to NVMe has ended; those of them that are VALID there are catalogued."""
        names, parents, nvme = self.rows, self.rows.parent, self.pools[Tier.NVME]
        self.ledger.record(
            [
                RecordedBlock(
                    key=names.key(row),
                    parent=None if parents[row] == NO_ROW else names.key(parents[row]),
                    first_block=names.depth[row],
                    slot=nvme.slot(row),
                )
                for row in rows
                if nvme.is_valid(row)
            ]
        )

    def leave_in(self, tier: Tier, slot: int, row: int) -> None:
        """A transfer into `slot`, free now, has come to nothing: it may hold bytes of `row`."""
        if tier is not Tier.NVME:
            return
        if self.rows.disk[row]:
            self.ledger.leave(slot, self.rows.key(row))
        else:  # its session was closed meanwhile
            self._erase_free(slot)

    def erase_remains(self, keys: Iterable[BlockKey]) -> None:
        """What was dropped of `keys` and is still in free slots of NVMe has to go."""
        for key in keys:
            for slot in self.ledger.left_of(key):
                self._erase_free(slot)

    def _erase_free(self, slot: int) -> None:
        self.pools[Tier.NVME].erase(slot)
        self.ledger.overwrite((slot,))
        self.ledger.erase(slot)
        self.totals.erased += 1
