"""What sessions have said about their chains: which they still want, and which may go (pure).

A branch is known by the key of its last stored block. Closing one takes its blocks from
every tier, tail first, up to the first block that another branch ends in, that another chain
continues, or that was used since; what is pinned goes when it is not any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.policy import Kind
from kvstore.room import Leaving
from kvstore.rows import NO_ROW
from kvstore.transfers import RUN_BLOCKS
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.events import BranchRecorded
    from kvstore.store import Store
    from kvstore.types import BlockKey


class Branches:
    """Tips of branches, and the chains on their way out."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tips: dict[BlockKey, int] = {}
        self._replaced: dict[BlockKey, tuple[BlockKey, ...]] = {}  # tip -> tips of the tails it superseded
        self._closing: dict[BlockKey, float] = {}  # since when
        self._sleeping: dict[BlockKey, float] = {}

    def __len__(self) -> int:
        return len(self._tips)

    def record(self, event: BranchRecorded) -> None:
        """A branch has moved; what it left behind goes first from now on."""
        rows = self._store.blocks.rows
        if event.tip is not None:
            self._tips[event.tip] = self._tips.get(event.tip, 0) + 1
        if event.old_tip is not None:
            self._forget_tip(event.old_tip)
        for key in event.superseded:
            self._set_kind(rows.find(key), Kind.SUPERSEDED)
        self._remember_replaced(event)
        if event.tip is None or (tip := rows.find(event.tip)) == NO_ROW:
            return
        if event.final:
            self._let_go_first(tip)
            return
        rows.until[tip] = rows.now + event.keep_seconds
        self._set_kind(tip, Kind.PINNED if event.pinned else Kind.KEPT if event.keep_seconds > 0 else Kind.NORMAL)

    def close(self, tips: Sequence[BlockKey]) -> None:
        now = self._store.blocks.rows.now
        for tip in tips:
            self._forget_tip(tip)
            self._closing.update((replaced, now) for replaced in self._replaced.pop(tip, ()))
            self._closing[tip] = now

    def put_to_sleep(self, keys: Sequence[BlockKey]) -> None:
        """The HBM copies of the chain of `keys` should go, each once it has a copy below."""
        store = self._store
        for key in reversed(keys):
            row = store.blocks.rows.find(key)
            if row != NO_ROW and store.blocks.hbm.is_valid(row):
                self._sleeping[key] = store.blocks.rows.now
                return

    def are_falling_asleep(self, keys: Sequence[BlockKey]) -> bool:
        """Will more of this chain leave HBM because it was put to sleep?"""
        return any(key in self._sleeping for key in keys)

    def sweep(self) -> None:
        """Carry on with what is closing and falling asleep, as far as pins and transfers allow."""
        for key, since in list(self._closing.items()):
            if self._closed(key, since):
                del self._closing[key]
        for key, since in list(self._sleeping.items()):
            if self._is_asleep(key, since):
                del self._sleeping[key]

    def _closed(self, key: BlockKey, since: float) -> bool:
        """Drop the chain that ends in `key`; False if more can go later."""
        store, row = self._store, self._store.blocks.rows.find(key)
        while row != NO_ROW:
            rows = store.blocks.rows
            if rows.children[row] or rows.last[row] > since or rows.key(row) in self._tips:
                return True
            if any(pool.is_held(row) or pool.is_filling(row) for pool in store.blocks.pools):
                return False
            parent = rows.parent[row]
            for pool in store.blocks.pools:
                if pool.is_valid(row):
                    store.blocks.totals.closed += 1
                    store.blocks.drop(pool.tier, row)
            row = parent
        return True

    def _is_asleep(self, key: BlockKey, since: float) -> bool:
        """Move the chain that ends in `key` out of HBM, or start to; False while a copy is under way."""
        store, row = self._store, self._store.blocks.rows.find(key)
        while row != NO_ROW and not store.blocks.hbm.is_valid(row):
            row = store.blocks.rows.parent[row]
        while row != NO_ROW:
            if store.blocks.rows.last[row] > since:
                return True
            if not store.blocks.hbm.may_leave(row):
                return not any(row in transfer.rows for transfer in store.traffic.transfers if not transfer.late)
            parent = store.blocks.rows.parent[row]
            if not store.blocks.has_copy_below(Tier.HBM, row):
                leaving = store.room.demote(row, RUN_BLOCKS)
                return leaving is Leaving.NOW  # nothing below takes it: let it stay
            store.blocks.totals.released += 1
            store.blocks.drop(Tier.HBM, row)
            row = parent
        return True

    def _let_go_first(self, row: int) -> None:
        """Mark as FINAL what only this branch has."""
        rows = self._store.blocks.rows
        while row != NO_ROW and rows.children[row] <= 1 and (self._tips.get(rows.key(row), 0) <= 1):
            self._set_kind(row, Kind.FINAL)
            row = rows.parent[row]

    def _remember_replaced(self, event: BranchRecorded) -> None:
        """Closing the branch closes its superseded tails too, as far as they are still anywhere."""
        replaced = self._replaced.pop(event.old_tip, ()) if event.old_tip is not None else ()
        replaced += event.superseded[-1:]
        kept = tuple(key for key in replaced if self._store.blocks.rows.find(key) != NO_ROW)
        if kept and event.tip is not None:
            self._replaced[event.tip] = self._replaced.get(event.tip, ()) + kept

    def _set_kind(self, row: int, kind: Kind) -> None:
        if row != NO_ROW:
            self._store.blocks.rows.kind[row] = kind
            self._store.blocks.refresh(row)

    def _forget_tip(self, tip: BlockKey) -> None:
        count = self._tips.get(tip, 0)
        if count > 1:
            self._tips[tip] = count - 1
        else:
            self._tips.pop(tip, None)
