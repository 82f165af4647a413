"""What is done ahead of need, so that a turn that needs room finds it without IO (pure).

    high/low watermarks    of the slots that cannot be had without IO: above `high` blocks are copied
                           down, coldest first and at the cost of colder ones below, until `low`
    cleaner                keeps `clean_share` of HBM free or clean, as far as free slots below allow;
                           it never evicts to make a duplicate

A clean block stays where it is and leaves for nothing, so a copy down never costs a hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.policy import Kind
from kvstore.rows import NO_ROW
from kvstore.transfers import Purpose
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.config import PlannerConfig
    from kvstore.store import Store


class Upkeep:
    """Cleaner and watermarks; one copy ahead of need at a time, so that loads find the way free."""

    def __init__(self, store: Store, config: PlannerConfig) -> None:
        self._store = store
        self._config = config
        self._is_hbm_high = False
        self._is_dram_high = False

    def run(self) -> None:
        if self._store.blocks.has_tier(Tier.DRAM):
            self._keep_hbm_clean()
        if self._store.blocks.takes(Tier.NVME):
            self._keep_dram_low()

    def _keep_hbm_clean(self) -> None:
        store, config = self._store, self._config
        hbm = store.blocks.hbm
        at_hand = hbm.num_free + store.traffic.coming + store.blocks.cleaner.num_clean
        self._is_hbm_high = hbm.capacity - at_hand > hbm.capacity * (
            config.hbm_low if self._is_hbm_high else config.hbm_high
        )
        wanted = hbm.capacity * config.clean_share
        while at_hand < wanted or self._is_hbm_high:
            if store.traffic.transfers.with_purpose(Purpose.CLEAN) or not self._can_copy_down():
                return
            tip = store.blocks.cleaner.coldest()
            if tip == NO_ROW:
                return
            if store.blocks.rows.kind[tip] <= Kind.FINAL:
                store.blocks.cleaner.wake(tip)  # it goes first, and leaves nothing behind
            elif store.blocks.is_below(tip):
                store.blocks.cleaner.mark_clean(tip, store.blocks.hbm.num_leaving_with(tip))
            elif not store.room.clean(tip, may_evict=self._is_hbm_high):
                return
            at_hand = hbm.num_free + store.traffic.coming + store.blocks.cleaner.num_clean

    def _keep_dram_low(self) -> None:
        store, config = self._store, self._config
        dram = store.blocks.pools[Tier.DRAM]
        moving = sum(len(t.rows) for t in store.traffic.transfers.with_purpose(Purpose.DEMOTE) if t.source is Tier.DRAM)
        used = dram.num_used - moving
        self._is_dram_high = used > dram.capacity * (config.dram_low if self._is_dram_high else config.dram_high)
        if self._is_dram_high:
            store.room.relieve(Tier.DRAM, used - int(dram.capacity * config.dram_low))

    def _can_copy_down(self) -> bool:
        return self._store.blocks.takes(Tier.DRAM) and self._store.traffic.has_io_token(Tier.HBM, Tier.DRAM)
