"""The slots of one tier and its eviction frontier (pure).

A slot is in exactly one state:

    free          in `_free`
    OPEN          being written by, or private to, one turn: keyless, invisible
    FILLING       target of one live transfer
    VALID         holds the block of one row
    QUARANTINED   target of a transfer that is past its deadline and has not ended

A row is on the frontier iff its copy here is VALID, unpinned and childless here. Pinning
the last row of a run protects its ancestors: they have a child present. `evictable` counts
every VALID row that is not needed by itself or below, so a caller knows what repeated
`drop`s of the coldest would free before it drops anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from kvstore.policy import KINDS, inherited, worth
from kvstore.rows import ABSENT, NO_ROW, NO_SLOT, VALID, Rows

if TYPE_CHECKING:
    from kvstore.types import Tier

_Entry = tuple[float, int, int, int]  # last, -depth, row, stamp: coldest first, of those the deepest

_SLACK_ENTRIES = 1024


class Frontier:
    """Rows that may leave one tier: a heap per kind, cleaned lazily.

    An entry is live iff its stamp is the row's. A row that became hotter or changed kind
    keeps its entry until that comes up; then it is pushed where it belongs.
    """

    def __init__(self, rows: Rows, tier: Tier) -> None:
        self._rows = rows
        self._stamp = rows.copies[tier].stamp
        self._heaps: list[list[_Entry]] = [[] for _ in range(KINDS)]
        self.num_entries = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def add(self, row: int) -> None:
        """`row` may leave from now on."""
        self._stamp[row] += 1
        self._live += 1
        self._push(self._rows.kind[row], row)
        if self.num_entries > 2 * self._live + _SLACK_ENTRIES:
            self._compact()

    def discard(self, row: int) -> None:
        """`row` may no longer leave; it must be on the frontier."""
        self._stamp[row] += 1
        self._live -= 1

    def coldest(self) -> int:
        """The row worth least, still on the frontier; NO_ROW when there is none."""
        best = NO_ROW
        least: tuple[int, float] | None = None
        for kind, heap in enumerate(self._heaps):
            row = self._head(kind, heap)
            if row == NO_ROW:
                continue
            value = worth(kind, self._rows.last[row])
            if least is None or value < least:
                best, least = row, value
        return best

    def rows(self) -> set[int]:
        """Every row on the frontier; for check()."""
        return {row for heap in self._heaps for _, _, row, stamp in heap if stamp == self._stamp[row]}

    def _push(self, kind: int, row: int) -> None:
        rows = self._rows
        heappush(self._heaps[kind], (rows.last[row], -rows.depth[row], row, self._stamp[row]))
        self.num_entries += 1

    def _head(self, kind: int, heap: list[_Entry]) -> int:
        rows, stamps = self._rows, self._stamp
        while heap:
            last, _, row, stamp = heap[0]
            if stamp != stamps[row]:
                heappop(heap)
                self.num_entries -= 1
            elif rows.kind[row] != kind:
                heappop(heap)
                self.num_entries -= 1
                self._push(rows.kind[row], row)
            elif rows.last[row] > last:
                heapreplace(heap, (rows.last[row], -rows.depth[row], row, stamp))
            else:
                return row
        return NO_ROW

    def _compact(self) -> None:
        """Forget dead entries; amortised over the pushes that made them."""
        self.num_entries = 0
        for kind, heap in enumerate(self._heaps):
            self._heaps[kind] = [entry for entry in heap if entry[3] == self._stamp[entry[2]]]
            heapify(self._heaps[kind])
            self.num_entries += len(self._heaps[kind])


class Pool:
    """Slots of one tier; keeps the tier's columns of the block table and its counts."""

    def __init__(self, tier: Tier, capacity: int, rows: Rows) -> None:
        self.tier = tier
        self.capacity = capacity
        self.num_open = 0
        self.num_filling = 0
        self.num_valid = 0
        self.num_quarantined = 0
        self._num_held = 0  # VALID rows with held > 0
        self._free = array("i", range(capacity - 1, -1, -1))
        self._rows = rows
        self._copies = rows.copies[tier]
        self.frontier = Frontier(rows, tier)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """VALID blocks that a turn or transfer needs, directly or through a descendant."""
        return self._num_held

    @property
    def evictable(self) -> int:
        """VALID blocks that could be dropped one after the other."""
        return self.num_valid - self._num_held

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def is_valid(self, row: int) -> bool:
        return self._copies.state[row] == VALID

    def slot(self, row: int) -> int:
        """The slot that holds `row` here."""
        return self._copies.slot[row]

    def open(self, count: int) -> list[int]:
        """Turn `count` free slots OPEN; there must be as many."""
        assert count <= len(self._free), f"{self.tier.name}: {count} slots wanted, {len(self._free)} free"
        self.num_open += count
        return [self._free.pop() for _ in range(count)]

    def close(self, slots: Iterable[int]) -> None:
        """Free OPEN slots; what they hold is lost."""
        before = len(self._free)
        self._free.extend(slots)
        self.num_open -= len(self._free) - before

    def publish(self, row: int, slot: int) -> None:
        """The OPEN `slot` holds the block of `row`, which is absent here: make it VALID."""
        copies = self._copies
        assert copies.state[row] == ABSENT, f"{self.tier.name}: row {row} is present already"
        self.num_open -= 1
        self.num_valid += 1
        copies.state[row] = VALID
        copies.slot[row] = slot
        if copies.held[row]:
            self._num_held += 1
        parent = self._rows.parent[row]
        if parent != NO_ROW:
            if self._is_evictable(parent):
                self.frontier.discard(parent)
            copies.kids[parent] += 1
        if self._is_evictable(row):
            self.frontier.add(row)

    def reopen(self, row: int) -> int:
        """Make the copy of `row` OPEN again, private to the turn whose table it is in; its slot."""
        slot = self._remove(row)
        self.num_open += 1
        return slot

    def drop(self, row: int) -> None:
        """Free the slot of `row`, which is VALID here."""
        self._free.append(self._remove(row))

    def pin(self, row: int) -> None:
        """Keep `row` and its ancestors here until `unpin`."""
        if self._is_evictable(row):
            self.frontier.discard(row)
        copies, parents = self._copies, self._rows.parent
        held, state = copies.held, copies.state
        copies.pins[row] += 1
        while row != NO_ROW:
            held[row] += 1
            if held[row] > 1:
                return
            if state[row] == VALID:
                self._num_held += 1
            row = parents[row]

    def unpin(self, row: int) -> None:
        """Undo one `pin`."""
        copies, parents = self._copies, self._rows.parent
        held, state = copies.held, copies.state
        pinned = row
        copies.pins[row] -= 1
        assert copies.pins[row] >= 0, f"{self.tier.name}: row {row} is unpinned twice"
        while row != NO_ROW:
            held[row] -= 1
            if held[row]:
                break
            if state[row] == VALID:
                self._num_held -= 1
            row = parents[row]
        if self._is_evictable(pinned):
            self.frontier.add(pinned)

    def num_unheld(self, row: int) -> int:
        """Evictable blocks that pinning `row` would protect."""
        return self._count_upwards(row, holders=0)

    def num_held_alone(self, row: int) -> int:
        """Blocks that would become evictable if the only pin of `row` went; 0 when there are more."""
        return self._count_upwards(row, holders=1)

    def _count_upwards(self, row: int, holders: int) -> int:
        copies, parents = self._copies, self._rows.parent
        count = 0
        while row != NO_ROW and copies.held[row] == holders:
            count += copies.state[row] == VALID
            row = parents[row]
        return count

    def _is_evictable(self, row: int) -> bool:
        copies = self._copies
        return copies.state[row] == VALID and not copies.pins[row] and not copies.kids[row]

    def _remove(self, row: int) -> int:
        copies, rows = self._copies, self._rows
        assert copies.state[row] == VALID, f"{self.tier.name}: row {row} is not VALID"
        assert not copies.kids[row], f"{self.tier.name}: row {row} has children here"
        if self._is_evictable(row):
            self.frontier.discard(row)
        if copies.held[row]:
            self._num_held -= 1
        slot = copies.slot[row]
        self.num_valid -= 1
        copies.state[row] = ABSENT
        copies.slot[row] = NO_SLOT
        parent = rows.parent[row]
        if parent != NO_ROW:
            copies.kids[parent] -= 1
            # A parent is used whenever its child is; this is where it learns so, at no cost per turn.
            if rows.last[row] >= rows.last[parent]:
                rows.last[parent] = rows.last[row]
                rows.kind[parent] = inherited(rows.kind[parent], rows.kind[row])
            if self._is_evictable(parent):
                self.frontier.add(parent)
        return slot

    def check(self, live_rows: Iterable[int]) -> None:
        """Raise AssertionError unless columns, counts and frontier agree over `live_rows`."""
        rows, copies, name = self._rows, self._copies, self.tier.name
        used = self.num_open + self.num_filling + self.num_valid + self.num_quarantined
        assert len(self._free) + used == self.capacity, f"{name}: {len(self._free)} free + {used} used slots"
        kids: dict[int, int] = {}
        held: dict[int, int] = {}
        present = sorted(live_rows, key=lambda row: -rows.depth[row])
        for row in present:
            held[row] = held.get(row, 0) + copies.pins[row]
            parent = rows.parent[row]
            if parent == NO_ROW:
                continue
            if copies.state[row] != ABSENT:
                kids[parent] = kids.get(parent, 0) + 1
            if held[row]:
                held[parent] = held.get(parent, 0) + 1
        for row in present:
            assert copies.kids[row] == kids.get(row, 0), f"{name}: row {row} miscounts its children"
            assert copies.held[row] == held[row], f"{name}: row {row} is held {copies.held[row]}, not {held[row]}"
        valid = [row for row in present if copies.state[row] == VALID]
        slots = [copies.slot[row] for row in valid]
        assert len(valid) == self.num_valid, f"{name}: {len(valid)} rows VALID, {self.num_valid} counted"
        assert len({*slots, *self._free}) == len(slots) + len(self._free), f"{name}: a slot has two uses"
        assert self._num_held == sum(held[row] > 0 for row in valid), f"{name}: held rows are miscounted"
        frontier = {row for row in valid if not copies.pins[row] and not copies.kids[row]}
        assert self.frontier.rows() == frontier, f"{name}: the frontier is {self.frontier.rows()}, not {frontier}"
        assert len(self.frontier) == len(frontier), f"{name}: the frontier is miscounted"

    def valid_slots(self, live_rows: Iterable[int]) -> set[int]:
        """Slots of VALID rows; for check()."""
        return {self._copies.slot[row] for row in live_rows if self._copies.state[row] == VALID}

    def free_slots(self) -> set[int]:
        """Free slots; for check()."""
        return set(self._free)

    def num_pins(self, live_rows: Iterable[int]) -> int:
        """Sum of pins; for check()."""
        return sum(self._copies.pins[row] for row in live_rows)
