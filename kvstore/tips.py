"""Where branches end, and so which blocks may lie on NVMe (pure).

A branch is known by the key of its last stored block, its *tip*. Several may end in one block.
When that block is forgotten, because no tier has it any more, the tip moves up to the block
before it; so a branch is known as long as any of it is anywhere.

    rows.ends[row]   tips that lie in `row`, each once
    rows.disk[row]   branches that may lie on NVMe and end in `row`, counted one by one,
                     + children for which that count is not 0

A block may be copied to NVMe while its count is not 0. The moment it becomes 0, whatever copy
NVMe has must go: the last branch that allowed it was closed, replaced its tail, or was told to
stay in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.rows import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.dirty import Dirty
    from kvstore.rows import Rows
    from kvstore.types import BlockKey


class Tips:
    """Tips of branches, by key."""

    def __init__(self, rows: Rows, dirty: Dirty) -> None:
        self._rows = rows
        self._dirty = dirty
        self._branches: dict[BlockKey, int] = {}  # how many end here
        self._on_disk: dict[BlockKey, int] = {}  # how many of them may lie on NVMe
        self._row: dict[BlockKey, int] = {}  # only of tips of which a block is anywhere
        self._at: dict[int, tuple[BlockKey, ...]] = {}
        self._found: set[BlockKey] = set()
        rows.on_forget = self._move_up

    def __len__(self) -> int:
        return len(self._branches)

    def row(self, tip: BlockKey) -> int:
        """The last block of the branch at `tip` that is anywhere, as far as is known; NO_ROW when there is none."""
        return self._row.get(tip, NO_ROW)

    def add(self, tip: BlockKey, to_nvme: bool, last_known: int = NO_ROW) -> None:
        """One more branch ends at `tip`, or, where that block is nowhere any more, in `last_known` before it."""
        self._branches[tip] = self._branches.get(tip, 0) + 1
        self._place(tip)
        if self.row(tip) == NO_ROW and last_known != NO_ROW:
            for _ in range(self._on_disk.get(tip, 0)):
                self._hold(last_known)
            self._put(tip, last_known)
        if to_nvme:
            self._on_disk[tip] = self._on_disk.get(tip, 0) + 1
            self._hold(self.row(tip))

    def add_found(self, tips: Iterable[BlockKey]) -> None:
        """Of these it is only known that their blocks lie on NVMe: each counts as one branch until one is removed."""
        for tip in tips:
            self._found.add(tip)
            self.add(tip, to_nvme=True)

    def remove(self, tip: BlockKey) -> list[int]:
        """One branch less ends at `tip`, unknown or not; rows that may not lie on NVMe any more, the tail first.

        Where there are both kinds, it is taken for one that may lie there: a block too few on NVMe costs time, a
        block too many breaks a promise.
        """
        count = self._branches.get(tip, 0)
        if not count:
            return []
        on_disk, row = self._on_disk.get(tip, 0), self.row(tip)
        if on_disk:
            self._set(self._on_disk, tip, on_disk - 1)
        self._set(self._branches, tip, count - 1)
        if count == 1:
            self._found.discard(tip)
            self._displace(tip)
        return self._let_go(row) if on_disk else []

    def remove_found(self, keys: Iterable[BlockKey]) -> list[int]:
        """The chain of `keys` is closed: so is what was found of it. As `remove`."""
        gone = []
        for key in keys:
            if key in self._found:
                gone += self.remove(key)
        return gone

    def num_branches(self, row: int) -> int:
        """Branches of which `row` is the last block that is anywhere."""
        return sum(self._branches[tip] for tip in self._at.get(row, ()))

    # --- inside -----------------------------------------------------------------------

    def _place(self, tip: BlockKey) -> None:
        row, place = self._rows.find(tip), self.row(tip)
        if row in (NO_ROW, place):
            return
        on_disk = self._on_disk.get(tip, 0)
        for _ in range(on_disk):
            self._hold(row)
        if place != NO_ROW:  # it had moved up, and its block has been computed again
            self._displace(tip)
            for _ in range(on_disk):
                self._let_go(place)
        self._put(tip, row)

    def _put(self, tip: BlockKey, row: int) -> None:
        self._row[tip] = row
        self._at[row] = (*self._at.get(row, ()), tip)
        self._rows.ends[row] += 1

    def _displace(self, tip: BlockKey) -> None:
        row = self._row.pop(tip, NO_ROW)
        if row == NO_ROW:
            return
        self._rows.ends[row] -= 1
        others = tuple(other for other in self._at.pop(row) if other != tip)
        if others:
            self._at[row] = others

    def _hold(self, row: int) -> None:
        disk, parents = self._rows.disk, self._rows.parent
        while row != NO_ROW:
            disk[row] += 1
            if disk[row] > 1:
                return
            self._dirty.note(row)
            row = parents[row]

    def _let_go(self, row: int) -> list[int]:
        disk, parents = self._rows.disk, self._rows.parent
        gone = []
        while row != NO_ROW:
            disk[row] -= 1
            if disk[row]:
                break
            self._dirty.note(row)
            gone.append(row)
            row = parents[row]
        return gone

    def _move_up(self, row: int, parent: int) -> None:
        """`row`, in which tips lie and which has no child, is forgotten."""
        tips = self._at.pop(row)
        own = sum(self._on_disk.get(tip, 0) for tip in tips)
        self._rows.ends[row] = self._rows.disk[row] = 0
        for tip in tips:
            if parent == NO_ROW:
                del self._row[tip]
            else:
                self._row[tip] = parent
        if parent != NO_ROW:
            self._at[parent] = (*self._at.get(parent, ()), *tips)
            self._rows.ends[parent] += len(tips)
            self._rows.disk[parent] += own - (own > 0)  # until now it counted as one child

    @staticmethod
    def _set(counts: dict[BlockKey, int], tip: BlockKey, count: int) -> None:
        if count:
            counts[tip] = count
        else:
            counts.pop(tip, None)

    # --- laws -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless the columns of the block table say what is known here. Linear."""
        own: dict[int, int] = {}
        for row, tips in self._at.items():
            assert self._rows.ends[row] == len(tips), f"row {row} miscounts the tips in it"
            assert all(self._row[tip] == row for tip in tips), f"a tip in row {row} lies elsewhere"
            own[row] = sum(self._on_disk.get(tip, 0) for tip in tips)
        assert sum(map(len, self._at.values())) == len(self._row), "a tip is lost"
        assert self._row.keys() | self._on_disk.keys() | self._found <= self._branches.keys(), "a tip of no branch"
        below: dict[int, int] = {}
        for row in sorted(self._rows, key=lambda row: -self._rows.depth[row]):
            count = own.get(row, 0) + below.get(row, 0)
            assert self._rows.disk[row] == count, f"{count} branches let row {row} lie on NVMe, not as counted"
            assert self._rows.ends[row] == len(self._at.get(row, ())), f"row {row} has tips that are not known"
            if count and (parent := self._rows.parent[row]) != NO_ROW:
                below[parent] = below.get(parent, 0) + 1
