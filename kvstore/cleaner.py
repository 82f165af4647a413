"""Which idle blocks of HBM should have a copy below, so that they can leave without IO (pure).

Turns leave their chain's last row here when they end; that order is the order of coldness.
A chain whose rows all have a copy below moves from `_idle` to `_clean` with the number of
blocks that could leave. When rows leave HBM, tail first, the parent takes their place.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.rows import NO_ROW


class Cleaner:
    """Idle chains by coldness, and how many of the coldest blocks are clean already."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()  # the coldest first
        self._clean: dict[int, int] = {}
        self.num_clean = 0

    def rest(self, row: int) -> None:
        """The chain ending in `row` is idle from now on, and the warmest."""
        self.wake(row)
        self._idle[row] = None

    def wake(self, row: int) -> None:
        """The chain ending in `row` is in use again."""
        self._idle.pop(row, None)
        self.num_clean -= self._clean.pop(row, 0)

    def leave(self, row: int, parent: int) -> None:
        """`row` has left HBM."""
        if row in self._idle:
            del self._idle[row]
            if parent != NO_ROW:
                self._idle[parent] = None
                self._idle.move_to_end(parent, last=False)
        count = self._clean.pop(row, 0)
        self.num_clean -= count
        if count > 1 and parent != NO_ROW:
            self._clean[parent] = self._clean.get(parent, 0) + count - 1
            self.num_clean += count - 1

    def coldest(self) -> int:
        """The last row of the coldest chain that is not known to be clean; NO_ROW when there is none."""
        return next(iter(self._idle), NO_ROW)

    def mark_clean(self, row: int, count: int) -> None:
        """Every row of the chain ending in `row` has a copy below; `count` of them could leave."""
        self.wake(row)
        self._clean[row] = count
        self.num_clean += count

    def rows(self) -> set[int]:
        """For check()."""
        return {*self._idle, *self._clean}
