"""Blocks that NVMe should have and has not (pure).

    dirty   VALID in HBM or DRAM, wanted by a branch that may lie on NVMe, and not VALID there
    due     those of them that are to be copied as soon as that is possible, in this order

Rows become dirty in the order in which turns compute them, so both orders have parents first,
as a chain must be written for any of it to be found after a crash.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.rows import VALID

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.rows import Rows


class Dirty:
    """See the module. Without NVMe nothing is dirty. `all_due` makes due what becomes dirty."""

    def __init__(self, rows: Rows) -> None:
        self.rows: dict[int, None] = {}
        self.due: OrderedDict[int, None] = OrderedDict()  # taken from the front, which costs a plain dict a search
        self.all_due = False
        self._rows = rows
        self._states = tuple(copies.state for copies in rows.copies) if len(rows.copies) > 2 else None

    def note(self, row: int) -> None:
        """Something about `row` has changed."""
        if self._states is None:
            return
        hbm, dram, nvme = self._states
        if nvme[row] != VALID and self._rows.disk[row] and VALID in (hbm[row], dram[row]):
            self.rows.setdefault(row)
            if self.all_due:
                self.due.setdefault(row)
        else:
            self.rows.pop(row, None)
            self.due.pop(row, None)

    def make_due(self, rows: Iterable[int]) -> None:
        """Copy those of `rows` that are dirty."""
        for row in rows:
            if row in self.rows:
                self.due.setdefault(row)

    def check(self) -> None:
        """Raise AssertionError unless it holds what it should. Linear."""
        if self._states is None:
            return
        hbm, dram, nvme = self._states
        dirty = {
            row for row in self._rows if nvme[row] != VALID and self._rows.disk[row] and VALID in (hbm[row], dram[row])
        }
        assert self.rows.keys() == dirty, f"rows {dirty} are dirty, not {set(self.rows)}"
        assert self.due.keys() <= dirty, "a row is to be copied to NVMe that need not be"
