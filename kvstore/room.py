"""Making room in a tier: the coldest blocks leave, downwards where that keeps them (pure).

A block that has a copy below, or that nothing below takes, leaves at once; another is copied
down first and leaves when its copy is there. Only what some branch lets lie on NVMe goes there.
The last copy of a block goes only for one that is worth more, or when the tier below is unwell:
progress never waits for a lower tier. Whose blocks make room for whom is said in shares.py.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvstore.policy import Kind
from kvstore.rows import NO_ROW
from kvstore.transfers import RUN_BLOCKS, Purpose
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.pool import Pool
    from kvstore.residency import Residency
    from kvstore.traffic import Traffic


class Leaving(Enum):
    """How a row can leave HBM."""

    NOW = "now"  # it has a copy below, or nothing below takes it
    STARTED = "started"  # it is being copied down
    BUSY = "busy"  # it could be copied down once a transfer under way has ended


class Room:
    """See the module."""

    def __init__(self, blocks: Residency, traffic: Traffic) -> None:
        self._blocks = blocks
        self._traffic = traffic

    def available(self, tenant: int) -> int:
        """Slots of HBM that are free, or coming, or that `obtain` would find for `tenant`."""
        return self._at_hand() + self._blocks.hbm.shares.evictable_for(tenant)

    def available_beyond_share(self) -> int:
        """As `available`, whosever blocks have to leave."""
        return self._at_hand() + self._blocks.hbm.evictable

    def _at_hand(self) -> int:
        return self._blocks.hbm.num_free + self._traffic.coming

    def obtain(self, count: int, tenant: int, beyond_share: bool = False) -> int:
        """Free slots of HBM there are now, at most `count`; for the rest the coldest blocks are on their way down."""
        blocks, hbm = self._blocks, self._blocks.hbm
        while (lacking := count - self._at_hand()) > 0:
            row, most = hbm.shares.victim(tenant, beyond_share)
            if row == NO_ROW:
                break
            leaving = self.demote(row, min(lacking, most))
            if leaving is Leaving.BUSY:
                break
            if leaving is Leaving.NOW:
                stays_below = blocks.has_copy_below(Tier.HBM, row)
                blocks.totals.released += stays_below
                blocks.totals.evicted += not stays_below
                blocks.drop(Tier.HBM, row)
        return min(count, hbm.num_free)

    def demote(self, row: int, most: int) -> Leaving:
        """Start to copy down the run that ends in `row`, at most `most` blocks of it, or say that it can go now.

        A block that NVMe has goes to DRAM as well where that takes it: it may be back soon.
        """
        blocks, traffic = self._blocks, self._traffic
        if blocks.rows.kind[row] <= Kind.FINAL or blocks.can_read(Tier.DRAM, row):
            return Leaving.NOW
        is_in_nvme = blocks.can_read(Tier.NVME, row)
        for target in (Tier.DRAM, Tier.NVME):
            if not blocks.takes(target) or blocks.pools[target].is_present(row):
                continue
            if target is Tier.NVME and not blocks.may_sink(row):
                continue
            if not traffic.has_io_token(Tier.HBM, target):
                if traffic.is_moving(Tier.HBM, target) and not is_in_nvme:
                    return Leaving.BUSY
                continue  # every worker hangs, or it need not be waited for
            run = self._run_that_leaves_with(row, Tier.HBM, target, min(most, RUN_BLOCKS))
            count = min(len(run), traffic.num_ring_slots(Tier.HBM, target))
            slots = self.slots_in(target, count, blocks.hbm.frontier.worth(row), blocks.rows.tenant[row])
            if slots:
                traffic.begin(Purpose.DEMOTE, Tier.HBM, target, run[-len(slots) :], slots)
                return Leaving.STARTED
        return Leaving.NOW

    def clean(self, tip: int) -> bool:
        """Start to copy to free slots of DRAM the topmost blocks of the chain ending in `tip` that are not there."""
        dram = self._blocks.pools[Tier.DRAM]
        run = self._run_not_in(dram, tip)[:RUN_BLOCKS]
        slots = dram.open(min(len(run), dram.num_free))
        if slots:
            self._traffic.begin(Purpose.CLEAN, Tier.HBM, Tier.DRAM, run[: len(slots)], slots)
        return bool(slots)

    def relieve(self, tier: Tier, count: int) -> None:
        """Drop, or start to copy down, the coldest `count` blocks of a tier between two others.

        What the tier below may not have stays until somebody needs the room.
        """
        blocks, pool, below = self._blocks, self._blocks.pools[tier], Tier(tier + 1)
        while count > 0:
            row = pool.shares.coldest()
            if row == NO_ROW:
                return
            if self._is_expendable(tier, row):
                blocks.drop(tier, row)
                count -= 1
                continue
            if not blocks.may_sink(row) or not self._traffic.has_io_token(tier, below):
                return
            run = self._run_that_leaves_with(row, tier, below, min(count, RUN_BLOCKS))
            slots = self.slots_in(below, len(run), pool.frontier.worth(row), blocks.rows.tenant[row])
            if not slots:  # all that is below is warmer
                blocks.totals.evicted += blocks.is_only_in(tier, row)
                blocks.drop(tier, row)
                count -= 1
                continue
            self._traffic.begin(Purpose.DEMOTE, tier, below, run[-len(slots) :], slots)
            count -= len(slots)

    def slots_in(self, tier: Tier, count: int, worth: tuple[int, float], tenant: int) -> list[int]:
        """At most `count` OPEN slots of `tier` for `tenant`, dropping what is worth less and needs no IO to go.

        What others have beyond their share is worth less than anything within one's own.
        """
        blocks, pool = self._blocks, self._blocks.pools[tier]
        while pool.num_free < count:
            row, _ = pool.shares.victim(tenant)
            if row == NO_ROW:
                break
            is_owed = pool.shares.is_owed(tenant, count, blocks.rows.tenant[row])
            if not is_owed and pool.frontier.worth(row) >= worth:
                break
            is_expendable = self._is_expendable(tier, row)
            if not is_expendable and tier < Tier.NVME and blocks.may_sink(row):
                break  # it has to be written first, which `relieve` does ahead of need
            is_last = not is_expendable and blocks.is_only_in(tier, row)
            blocks.totals.evicted += is_last
            blocks.totals.displaced += tier is Tier.NVME and not is_expendable and not is_last
            blocks.drop(tier, row)
        slots = pool.open(min(count, pool.num_free))
        if tier is Tier.NVME:
            blocks.ledger.overwrite(slots)
        return slots

    def _is_expendable(self, tier: Tier, row: int) -> bool:
        """Is it a duplicate, superseded or final, or is there a copy below?"""
        return self._blocks.pools[tier].frontier.worth(row)[0] <= Kind.FINAL or self._blocks.has_copy_below(tier, row)

    def _run_that_leaves_with(self, row: int, source: Tier, target: Tier, most: int) -> list[int]:
        """`row` and its ancestors, in chain order, as far as only `row` keeps them in `source` and `target` lacks them.

        What may lie on NVMe has ancestors that may.
        """
        blocks, pool, parents = self._blocks, self._blocks.pools[source], self._blocks.rows.parent
        run = [row]
        parent = parents[row]
        while len(run) < most and parent != NO_ROW and pool.is_valid(parent):
            if pool.num_kids(parent) > 1 or pool.is_held(parent) or blocks.pools[target].is_present(parent):
                break
            if source is Tier.HBM and blocks.pools[Tier.DRAM].is_present(parent):
                break  # it can leave as it is
            run.append(parent)
            parent = parents[parent]
        return run[::-1]

    def _run_not_in(self, pool: Pool, tip: int) -> list[int]:
        """`tip` and its ancestors, up to the first that is in `pool` already, in chain order."""
        run = []
        while tip != NO_ROW and not pool.is_present(tip):
            run.append(tip)
            tip = self._blocks.rows.parent[tip]
        return run[::-1]
