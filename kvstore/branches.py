"""What sessions have said about their chains: which they still want, and which may go (pure).

A branch is known by its tip (tips.py). Closing one takes its blocks from every tier, tail first,
up to the first block that another branch ends in, that another chain continues, or that was used
since; what is pinned goes when it is not any more. A block that no branch lets lie on NVMe any
longer loses its copy there, whoever else has it above, and the bytes of that go too.
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

    from kvstore.config import PlannerConfig
    from kvstore.events import BranchRecorded, SessionClosed
    from kvstore.sinking import Sinking
    from kvstore.store import Store
    from kvstore.types import BlockKey


class Branches:
    """Tips of branches, and the chains on their way out."""

    def __init__(self, store: Store, sinking: Sinking, config: PlannerConfig) -> None:
        self._store = store
        self._sinking = sinking
        self._min_blocks = config.blocks_for(config.nvme_min_tokens)
        self._tips = store.blocks.tips
        self._replaced: dict[BlockKey, tuple[BlockKey, ...]] = {}  # tip -> tips of the tails it superseded
        self._closing: dict[BlockKey, float] = {}  # since when
        self._sleeping: dict[BlockKey, tuple[float, Tier]] = {}  # since when, and where to

    def __len__(self) -> int:
        return len(self._tips)

    def record(self, event: BranchRecorded) -> None:
        """A branch has moved; what it left behind goes first from now on."""
        rows = self._store.blocks.rows
        to_nvme = event.to_nvme and not event.final
        if event.tip is not None:
            self._tips.add(event.tip, to_nvme and self._is_long_enough(event.tip), self._last_known(event))
        if event.old_tip is not None:
            self._revoke(self._tips.remove(event.old_tip))
        for key in event.superseded:
            self._set_kind(rows.find(key), Kind.SUPERSEDED)
        self._revoke(self._tips.remove_found(event.superseded))
        self._store.blocks.erase_remains(event.superseded)
        self._remember_replaced(event)
        if event.tip is None or (tip := rows.find(event.tip)) == NO_ROW:
            return
        if event.final:
            self._let_go_first(tip)
            return
        rows.until[tip] = rows.now + event.keep_seconds
        self._set_kind(tip, Kind.PINNED if event.pinned else Kind.KEPT if event.keep_seconds > 0 else Kind.NORMAL)
        if to_nvme:
            self._sinking.branch_moved(event.tip, event.old_tip)

    def _last_known(self, event: BranchRecorded) -> int:
        """The last row of what the branch had before and still has; where its tip is when all that is new has gone."""
        rows = self._store.blocks.rows
        row = NO_ROW if event.old_tip is None else self._tips.row(event.old_tip)
        replaced = set(event.superseded)
        while row != NO_ROW and rows.key(row) in replaced:
            row = rows.parent[row]
        return row

    def close(self, event: SessionClosed) -> None:
        for tip in event.tips:
            row = self._tips.row(tip)
            self._close(row if row != NO_ROW else self._store.blocks.rows.find(tip))
            self._revoke(self._tips.remove(tip))
            self._sinking.forget(tip)
            for replaced in self._replaced.pop(tip, ()):
                self._close(self._store.blocks.rows.find(replaced))
        for chain in event.chains:
            self._close_chain(chain)

    def rest(self, tip: BlockKey) -> None:
        """A turn's blocks may lie on NVMe while it waits, for room to go on or for its branch to be recorded, as if a
        branch ended in the last of them."""
        self._tips.add(tip, to_nvme=True)

    def end_rest(self, tip: BlockKey, abandoned: Sequence[BlockKey] = ()) -> None:
        """It is over. `abandoned` is the turn's chain, where nobody else will see to what NVMe has left of it."""
        self._revoke(self._tips.remove(tip))
        self._store.blocks.erase_remains(abandoned)

    def put_to_sleep(self, keys: Sequence[BlockKey], target: Tier) -> None:
        """The copies above `target` of the chain of `keys` should go, each once it has a copy there."""
        blocks = self._store.blocks
        if target is Tier.NVME and not blocks.has_tier(target):
            target = Tier.DRAM
        for key in reversed(keys):
            row = blocks.rows.find(key)
            if row != NO_ROW and any(pool.is_valid(row) for pool in blocks.pools[:target]):
                self._sleeping[key] = blocks.rows.now, target
                if target is Tier.NVME:
                    self._sinking.ask_for(row)
                return

    def are_falling_asleep(self, keys: Sequence[BlockKey]) -> bool:
        """Will more of this chain leave HBM because it was put to sleep?"""
        return any(key in self._sleeping for key in keys)

    def sweep(self) -> None:
        """Carry on with what is closing and falling asleep, as far as pins and transfers allow."""
        for key, since in list(self._closing.items()):
            if self._closed(key, since):
                del self._closing[key]
        for key in list(self._store.blocks.revoked):
            if self._is_revoked(key):
                del self._store.blocks.revoked[key]
        for key, (since, target) in list(self._sleeping.items()):
            is_asleep = self._is_in_nvme(key, since) if target is Tier.NVME else self._is_asleep(key, since)
            if is_asleep:
                del self._sleeping[key]

    def _close(self, row: int) -> None:
        if row != NO_ROW:
            self._closing[self._store.blocks.rows.key(row)] = self._store.blocks.rows.now

    def _close_chain(self, chain: Sequence[BlockKey]) -> None:
        """What an earlier process left of it, and what it left in slots of NVMe that are free now."""
        blocks = self._store.blocks
        self._revoke(self._tips.remove_found(chain))
        for key in reversed(chain):
            if (row := blocks.rows.find(key)) != NO_ROW:
                self._close(row)
                break
        blocks.erase_remains(chain)

    def _closed(self, key: BlockKey, since: float) -> bool:
        """Drop the chain that ends in `key`; False if more can go later."""
        store, row = self._store, self._store.blocks.rows.find(key)
        while row != NO_ROW:
            rows = store.blocks.rows
            if rows.children[row] or rows.last[row] > since or rows.ends[row]:
                return True
            if any(pool.is_held(row) or pool.is_filling(row) for pool in store.blocks.pools):
                return False
            parent = rows.parent[row]
            for pool in store.blocks.pools:
                if pool.is_valid(row):
                    store.blocks.totals.closed += 1
                    store.blocks.drop(pool.tier, row, erase=True)
            row = parent
        return True

    def _revoke(self, gone: list[int]) -> None:
        """No branch lets these rows lie on NVMe any longer."""
        blocks = self._store.blocks
        if not blocks.has_tier(Tier.NVME):
            return
        for row in gone:
            if blocks.pools[Tier.NVME].is_present(row):
                self._store.blocks.revoked[blocks.rows.key(row)] = None

    def _is_revoked(self, key: BlockKey) -> bool:
        """Drop NVMe's copy of `key`; False while it is being read or written."""
        blocks = self._store.blocks
        row, nvme = blocks.rows.find(key), blocks.pools[Tier.NVME]
        if row == NO_ROW or blocks.rows.disk[row] or not nvme.is_present(row):
            return True  # gone, or wanted again
        if nvme.is_filling(row) or nvme.is_held(row):
            return False
        blocks.drop(Tier.NVME, row, erase=True)
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
                return not self._is_moving(row)
            parent = store.blocks.rows.parent[row]
            leaving = store.room.demote(row, RUN_BLOCKS)
            if leaving is not Leaving.NOW:
                return False
            if not store.blocks.has_copy_below(Tier.HBM, row):
                return True  # nothing below takes it: let it stay
            store.blocks.totals.released += 1
            store.blocks.drop(Tier.HBM, row)
            row = parent
        return True

    def _is_in_nvme(self, key: BlockKey, since: float) -> bool:
        """Drop what is above NVMe of the chain that ends in `key`; False while some of it is still to be copied."""
        blocks = self._store.blocks
        row, above = blocks.rows.find(key), blocks.pools[: Tier.NVME]
        while row != NO_ROW:
            parent = blocks.rows.parent[row]
            if blocks.rows.last[row] > since:
                return True
            present = [pool for pool in above if pool.is_present(row)]
            if present and not blocks.can_read(Tier.NVME, row):
                if self._sinking.is_due(row) and (blocks.takes(Tier.NVME) or blocks.pools[Tier.NVME].is_filling(row)):
                    return False
                self._sleeping[key] = since, Tier.DRAM  # the rest goes as far as it can
                return self._is_asleep(key, since)
            for pool in present:
                if not pool.may_leave(row):
                    return not self._is_moving(row)
                blocks.totals.released += pool.tier is Tier.HBM
                blocks.drop(pool.tier, row)
            row = parent
        return True

    def _is_moving(self, row: int) -> bool:
        return any(row in transfer.rows for transfer in self._store.traffic.transfers if not transfer.late)

    def _is_long_enough(self, tip: BlockKey) -> bool:
        row = self._store.blocks.rows.find(tip)
        return row == NO_ROW or self._store.blocks.rows.depth[row] + 1 >= self._min_blocks

    def _let_go_first(self, tip: int) -> None:
        """Mark as FINAL what only this branch has."""
        rows, row = self._store.blocks.rows, tip
        while row != NO_ROW and rows.children[row] <= 1 and self._tips.num_branches(row) <= (row == tip):
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
