"""What is done ahead of need, so that a turn that needs room finds it without IO (pure).

    cleaner       keeps `clean_share` of HBM free or clean, as far as free slots of DRAM allow, or what
                  NVMe has anyway; it never evicts anything to make a duplicate
    watermarks    when more than `high` of a tier cannot be had without IO, its coldest blocks move
                  down, at the cost of colder ones below, until it is `low`; of several tenants those of who
                  uses most, in HBM only beyond the share

A clean block stays where it is and leaves for nothing; so it counts as room, and what is
copied down ahead of need costs no hit.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kvstore.policy import Kind
from kvstore.room import Leaving
from kvstore.rows import NO_ROW
from kvstore.transfers import Purpose
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.config import PlannerConfig
    from kvstore.store import Store

MOST_AT_ONCE = 128
"""Blocks of DRAM that leave in one call: a tenth of a large tier, dropped at once, would hold up every turn for
tens of milliseconds. The next event goes on."""


class Upkeep:
    """Cleaner and watermarks. The cleaner makes one copy at a time, so that others find the way free."""

    def __init__(self, store: Store, config: PlannerConfig) -> None:
        self._store = store
        self._config = config
        self._is_hbm_high = False
        self._is_dram_high = False

    def run(self) -> None:
        if len(self._store.blocks.pools) > 1:
            self._keep_hbm_clean()
        if self._store.blocks.takes(Tier.NVME):
            self._keep_dram_low()

    def _keep_hbm_clean(self) -> None:
        config, hbm = self._config, self._store.blocks.hbm
        limit = config.hbm_low if self._is_hbm_high else config.hbm_high
        self._is_hbm_high = hbm.capacity - self._at_hand() > hbm.capacity * limit
        share = max(config.clean_share, 1.0 - config.hbm_low if self._is_hbm_high else 0.0)
        while (lacking := hbm.capacity * share - self._at_hand()) > 0:
            tip = self._store.blocks.cleaner.coldest(hbm.shares.used)
            if tip == NO_ROW or not self._move_down(tip, ceil(lacking)):
                return

    def _at_hand(self) -> int:
        """Slots of HBM that are free, or will be without any further IO."""
        blocks = self._store.blocks
        return blocks.hbm.num_free + self._store.traffic.coming + blocks.cleaner.num_clean

    def _move_down(self, tip: int, most: int) -> bool:
        """Do the next thing about the coldest idle chain; False if there is nothing to do at present."""
        blocks, room = self._store.blocks, self._store.room
        if blocks.rows.kind[tip] <= Kind.FINAL or blocks.hbm.num_kids(tip):
            blocks.cleaner.wake(tip)  # it leaves nothing behind when it goes, or goes only after its children
            return True
        if blocks.hbm.is_held(tip):
            return False  # it is being copied, or a hint builds on it
        if not blocks.pools[Tier.DRAM].is_present(tip):
            if self._is_hbm_high and not blocks.hbm.shares.keeps(blocks.rows.tenant[tip]):
                leaving = room.demote(tip, most)
                if leaving is not Leaving.NOW:
                    return leaving is Leaving.STARTED
            elif blocks.takes(Tier.DRAM) and self._store.traffic.has_io_token(Tier.HBM, Tier.DRAM):
                if self._store.traffic.transfers.with_purpose(Purpose.CLEAN):
                    return False
                if room.clean(tip):
                    return True
            if not blocks.is_below(tip):
                return False
        blocks.cleaner.mark_clean(tip, blocks.hbm.num_leaving_with(tip))
        return True

    def _keep_dram_low(self) -> None:
        store, config = self._store, self._config
        dram = store.blocks.pools[Tier.DRAM]
        moving = sum(len(t.rows) for t in store.traffic.transfers.with_purpose(Purpose.DEMOTE) if t.source is Tier.DRAM)
        used = dram.num_used - moving
        self._is_dram_high = used > dram.capacity * (config.dram_low if self._is_dram_high else config.dram_high)
        if self._is_dram_high:
            excess = used - int(dram.capacity * config.dram_low)
            store.room.relieve(Tier.DRAM, min(excess, MOST_AT_ONCE))
