"""The rows that may leave one tier, coldest first (pure).

What leaves at no loss has one heap per kind, the rest one per tenant and kind; cleaned lazily: an entry is live
iff its stamp is the row's. A row that
became hotter or changed kind keeps its entry until that comes up and is then pushed where
it belongs; a row that became *less* worth keeping must be `refresh`ed, or it would be found
too late. The KEPT heap is ordered by when its rows stop being kept, the others by recency.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from kvstore.policy import KINDS, Kind, worth
from kvstore.rows import NO_ROW, VALID, Copies, Rows
from kvstore.types import Tier

_Entry = tuple[float, int, int, int]  # moment, -depth, row, stamp: coldest first, of those the deepest

_SLACK_ENTRIES = 1024

_AT_NO_LOSS = Kind.FINAL + 1
"""Kinds below this are no tenant's to keep."""


class Frontier:
    """See the module; `Pool` says which rows are on it."""

    def __init__(self, rows: Rows, tier: Tier) -> None:
        self._rows = rows
        self._stamp = rows.copies[tier].stamp
        # What HBM holds leaves DRAM at no loss. NVMe's copies are not only for making room: they are what is there
        # after a restart, so it is the coldest that leave.
        self._above: Copies | None = rows.copies[Tier.HBM] if tier is Tier.DRAM else None
        self._at_no_loss: list[list[_Entry]] = [[] for _ in range(_AT_NO_LOSS)]
        self._kept: list[list[list[_Entry]]] = []  # by tenant: one heap for each kind that is left
        self.live = rows.tenancy.column()  # rows on the frontier, by tenant
        self._live = 0
        self._has_moved = False
        self.num_entries = 0  # dead ones included

    def __len__(self) -> int:
        return self._live

    def add(self, row: int) -> None:
        """`row` may leave from now on."""
        self._stamp[row] += 1
        self._live += 1
        self.live[self._rows.tenant[row]] += 1
        self._push(row)
        if self.num_entries > 2 * self._live + _SLACK_ENTRIES:
            self._compact()

    def add_all(self, rows: list[int]) -> None:
        """As `add`, for many at once: nothing may be on the frontier yet."""
        assert not self.num_entries
        for row in rows:
            self._stamp[row] += 1
            self.live[self._rows.tenant[row]] += 1
            kind = self._kind(row)
            heap = self._heap(kind, self._rows.tenant[row])
            heap.append((self._moment(kind, row), -self._rows.depth[row], row, self._stamp[row]))
        for heap in self._heaps():
            heapify(heap)
        self._live = self.num_entries = len(rows)

    def discard(self, row: int) -> None:
        """`row` may no longer leave; it must be on the frontier."""
        self._stamp[row] += 1
        self._live -= 1
        self.live[self._rows.tenant[row]] -= 1

    def coldest(self) -> int:
        """The row worth least, still on the frontier, whosever it is; NO_ROW when there is none."""
        row = self.coldest_at_no_loss()
        if row != NO_ROW or not self._live:
            return row
        if len(self.live) == 1:
            return self.coldest_of(0)
        heads = (self.coldest_of(tenant) for tenant, blocks in enumerate(self.live) if blocks)
        return min((row for row in heads if row != NO_ROW), key=self.worth, default=NO_ROW)

    def coldest_at_no_loss(self) -> int:
        """The first row that leaves at no loss to anybody; NO_ROW when there is none."""
        for kind, heap in enumerate(self._at_no_loss):
            if heap and (row := self._head(kind, heap)) != NO_ROW:
                return row
        return NO_ROW

    def coldest_of(self, tenant: int) -> int:
        """The row of `tenant` worth least, where nothing leaves at no loss; NO_ROW when there is none."""
        if tenant >= len(self._kept):
            return NO_ROW
        self._has_moved = True
        while self._has_moved:  # a head that went to another heap may belong before the best so far
            self._has_moved = False
            best = self._best_head(self._kept[tenant])
        return best if best != NO_ROW else self.coldest_at_no_loss()

    def _best_head(self, heaps: list[list[_Entry]]) -> int:
        last = self._rows.last
        best = NO_ROW
        least: tuple[int, float] | None = None
        for kind, heap in enumerate(heaps, _AT_NO_LOSS):
            if heap and (row := self._head(kind, heap)) != NO_ROW:
                value = worth(kind, last[row])
                if least is None or value < least:
                    best, least = row, value
        return best

    def worth(self, row: int) -> tuple[int, float]:
        """What `row` is worth in this tier; compares with the worth of others anywhere."""
        return worth(self._kind(row), self._rows.last[row])

    def rows(self) -> list[int]:
        """Every row on the frontier; for check()."""
        return [row for heap in self._heaps() for _, _, row, stamp in heap if stamp == self._stamp[row]]

    def _kind(self, row: int) -> int:
        if self._above is not None and self._above.state[row] == VALID:
            return Kind.DUPLICATE
        kind = self._rows.kind[row]
        if kind == Kind.KEPT and self._rows.until[row] <= self._rows.now:
            return Kind.NORMAL
        return kind

    def _moment(self, kind: int, row: int) -> float:
        return self._rows.until[row] if kind == Kind.KEPT else self._rows.last[row]

    def _heaps(self) -> list[list[_Entry]]:
        return [*self._at_no_loss, *(heap for heaps in self._kept for heap in heaps)]

    def _heap(self, kind: int, tenant: int) -> list[_Entry]:
        if kind < _AT_NO_LOSS:
            return self._at_no_loss[kind]
        while tenant >= len(self._kept):
            self._kept.append([[] for _ in range(_AT_NO_LOSS, KINDS)])
        return self._kept[tenant][kind - _AT_NO_LOSS]

    def _push(self, row: int) -> None:
        kind = self._kind(row)
        entry = (self._moment(kind, row), -self._rows.depth[row], row, self._stamp[row])
        heappush(self._heap(kind, self._rows.tenant[row]), entry)
        self.num_entries += 1

    def _head(self, kind: int, heap: list[_Entry]) -> int:
        stamps = self._stamp
        while heap:
            moment, _, row, stamp = heap[0]
            if stamp != stamps[row]:
                heappop(heap)
                self.num_entries -= 1
            elif self._kind(row) != kind:
                heappop(heap)
                self.num_entries -= 1
                self._push(row)
                self._has_moved = True
            elif self._moment(kind, row) > moment:
                heapreplace(heap, (self._moment(kind, row), -self._rows.depth[row], row, stamp))
            else:
                return row
        return NO_ROW

    def _compact(self) -> None:
        """Forget dead entries; amortised over the pushes that made them."""
        self.num_entries = 0
        for heap in self._heaps():
            heap[:] = [entry for entry in heap if entry[3] == self._stamp[entry[2]]]
            heapify(heap)
            self.num_entries += len(heap)
