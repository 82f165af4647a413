"""Whose blocks and turns these are (pure).

A tenant is an index here. It is *active* while any tier has a block of it, or it has a turn; the active ones share
every tier alike. Where nobody has a key there is one tenant, and nobody to be fair to.
"""

from __future__ import annotations


class Tenancy:
    """Tenants by name, and which of them are active. A name keeps its index: there are as many as keys."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}
        self._columns: list[list[int]] = []
        self.num_active = 0
        self._uses = self.column()  # blocks in the block table, and turns

    @property
    def is_shared(self) -> bool:
        """Is there anybody to be fair to?"""
        return self.num_active > 1

    def index(self, name: str) -> int:
        """The index of `name`, a new one the first time."""
        known = self._indices.get(name)
        if known is None:
            known = self._indices[name] = len(self._indices)
            for column in self._columns:
                column.append(0)
        return known

    def column(self) -> list[int]:
        """A count of something by tenant, which grows with them."""
        column = [0] * len(self._indices)
        self._columns.append(column)
        return column

    def begin_use(self, tenant: int) -> None:
        """It has one block, or turn, more."""
        self._uses[tenant] += 1
        self.num_active += self._uses[tenant] == 1

    def end_use(self, tenant: int) -> None:
        """It has one block, or turn, less."""
        self._uses[tenant] -= 1
        self.num_active -= self._uses[tenant] == 0

    def uses(self) -> list[int]:
        """Blocks and turns of each tenant; for check()."""
        return list(self._uses)
