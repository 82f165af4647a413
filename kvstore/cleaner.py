"""Which idle blocks of HBM should have a copy below, so that they can leave without IO (pure).

Turns leave their chain's last row here when they end; that order, within a tenant, is the order of coldness.
A chain whose rows all have a copy below moves from `_idle` to `_clean` with the number of
blocks that could leave. When rows leave HBM, tail first, the parent takes their place.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.rows import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.rows import Rows


class Cleaner:
    """Idle chains by coldness, and how many of the coldest blocks are clean already."""

    def __init__(self, rows: Rows) -> None:
        self._tenants = rows.tenant
        self._idle: dict[int, OrderedDict[int, None]] = {}  # by tenant; the coldest first, never empty
        self._clean: dict[int, int] = {}
        self.num_clean = 0

    def rest(self, row: int) -> None:
        """The chain ending in `row` is idle from now on, and the warmest."""
        self.wake(row)
        self._idle_of(row)[row] = None

    def wake(self, row: int) -> None:
        """The chain ending in `row` is in use again."""
        self._forget(row)
        self.num_clean -= self._clean.pop(row, 0)

    def leave(self, row: int, parent: int) -> None:
        """`row` has left HBM."""
        if self._forget(row) and parent != NO_ROW:
            idle = self._idle_of(parent)
            idle[parent] = None
            idle.move_to_end(parent, last=False)
        count = self._clean.pop(row, 0)
        self.num_clean -= count
        if count > 1 and parent != NO_ROW:
            self._clean[parent] = self._clean.get(parent, 0) + count - 1
            self.num_clean += count - 1

    def coldest(self, used: Callable[[int], int]) -> int:
        """The last row of the coldest chain that is not known to be clean; NO_ROW when there is none.

        Of several tenants that have such chains, the one that has `used` most.
        """
        if not self._idle:
            return NO_ROW
        tenant = next(iter(self._idle)) if len(self._idle) == 1 else max(self._idle, key=used)
        return next(iter(self._idle[tenant]))

    def mark_clean(self, row: int, count: int) -> None:
        """Every row of the chain ending in `row` has a copy below; `count` of them could leave."""
        self.wake(row)
        self._clean[row] = count
        self.num_clean += count

    def rows(self) -> set[int]:
        """For check()."""
        return {*(row for idle in self._idle.values() for row in idle), *self._clean}

    def _idle_of(self, row: int) -> OrderedDict[int, None]:
        return self._idle.setdefault(self._tenants[row], OrderedDict())

    def _forget(self, row: int) -> bool:
        """Take `row` out of the idle ones; False where it is none."""
        tenant = self._tenants[row]
        idle = self._idle.get(tenant)
        if idle is None or row not in idle:
            return False
        del idle[row]
        if not idle:
            del self._idle[tenant]
        return True
