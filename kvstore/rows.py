"""The block table: every known block is an integer row in parallel arrays (pure).

Nothing per block is visible to the garbage collector: 300,000 block objects cost an 82 ms
gen-2 pause, arrays 0.7. A row lives as long as a copy of its block is present in some tier,
something pins it, or a child row names it as its parent; so `parent[row]` is always a live
row or NO_ROW, and walking up a chain needs no checks. All blocks of a chain are one tenant's.

`now` is the store's clock, set by the planner with every event. `Copies` holds what is
known of the rows in one tier. Its laws:

    kids[row]  children whose copy in this tier is present (FILLING or VALID)
    pins[row]  turns and transfers that need this very copy
    held[row]  pins[row] + children with held > 0: the row is needed by itself or below
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Final

from kvstore.policy import Kind, inherited
from kvstore.tenancy import Tenancy
from kvstore.types import BlockKey, Tier

KEY_BYTES: Final = 16
NO_ROW: Final = -1
NO_SLOT: Final = -1

ABSENT: Final = 0
FILLING: Final = 1  # target of one live transfer
VALID: Final = 2  # bytes exist; never written again

_GROWTH_ROWS: Final = 1024


class Copies:
    """Columns of one tier, indexed by row; see the module's laws."""

    __slots__ = ("held", "kids", "pins", "slot", "stamp", "state")

    def __init__(self) -> None:
        self.slot = array("i")
        self.state = array("b")
        self.pins = array("i")
        self.kids = array("i")
        self.held = array("i")
        # Never reset, not even when a row is reused: a queue entry with an older stamp is dead.
        self.stamp = array("q")

    def grow(self, rows: int) -> None:
        """Append `rows` empty rows."""
        self.slot.extend([NO_SLOT] * rows)
        for column in (self.state, self.pins, self.kids, self.held, self.stamp):
            column.frombytes(bytes(rows * column.itemsize))


class Rows:
    """Keys, chains and recency of all blocks; the tiers' columns grow with it."""

    def __init__(self, tiers: int) -> None:
        self.tenancy = Tenancy()
        self._index: dict[BlockKey, int] = {}
        self._keys = bytearray()
        self._free = array("i")
        self.parent = array("i")
        self.depth = array("i")  # blocks before this one in its chain
        self.children = array("i")  # child rows, wherever their copies are
        self.last = array("d")  # seconds: when the chain through this row was last used
        self.tenant = array("i")  # index of who asked for it (tenancy.py)
        self.kind = array("b")  # policy.Kind of the branch that used it last
        self.until = array("d")  # seconds: until when a KEPT row asked to stay
        self.ends = array("i")  # tips of branches that lie here (tips.py)
        self.disk = array("i")  # whether branches let it lie on NVMe (tips.py)
        self.origin = array("b")  # Tier its HBM copy was read from since a turn last used it
        self.now = 0.0
        self.on_forget: Callable[[int, int], None] | None = None  # (row, parent), of a row in which tips lie
        self.copies = tuple(Copies() for _ in range(tiers))

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[int]:
        return iter(self._index.values())

    def find(self, key: BlockKey) -> int:
        """The row of `key`, or NO_ROW."""
        return self._index.get(key, NO_ROW)

    def key(self, row: int) -> BlockKey:
        """The key `row` was added under."""
        return BlockKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def add(self, key: BlockKey, parent: int, tenant: int) -> int:
        """A new row for `key`, which must be unknown, of `tenant`, as its parent is; no copy is present yet."""
        assert key not in self._index
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._index[key] = row
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self.parent[row] = parent
        self.depth[row] = 0 if parent == NO_ROW else self.depth[parent] + 1
        self.last[row] = self.now
        self.tenant[row] = tenant
        self.tenancy.begin_use(tenant)
        self.kind[row] = Kind.NORMAL
        self.until[row] = 0.0
        self.origin[row] = Tier.HBM
        if parent != NO_ROW:
            self.children[parent] += 1
        return row

    def forget_unused(self, row: int) -> None:
        """Forget `row` if nothing needs it, and then its ancestors for which that has become true.

        A row that is forgotten already stays so.
        """
        while row != NO_ROW and not self._is_used(row):
            key = self.key(row)
            if self._index.get(key) != row:
                return
            parent = self.parent[row]
            if self.ends[row]:
                assert self.on_forget is not None
                self.on_forget(row, parent)
            del self._index[key]
            self._free.append(row)
            self.tenancy.end_use(self.tenant[row])
            if parent != NO_ROW:
                self.children[parent] -= 1
            row = parent

    def touch(self, row: int, kind: int = Kind.NORMAL, until: float = 0.0) -> None:
        """Note that the chain ending in `row` is in use; ancestors inherit it when their children leave.

        Whoever asked before that it stay longer still has that.
        """
        self.last[row] = self.now
        self.kind[row] = max(self.kind[row], kind)
        self.until[row] = max(self.until[row], until)

    def inherit(self, parent: int, row: int) -> None:
        """`row` leaves a tier: `parent` is as recent, and as worth keeping, as the chain through it was."""
        if self.last[row] >= self.last[parent]:
            self.last[parent] = self.last[row]
            self.kind[parent] = inherited(self.kind[parent], self.kind[row])
            self.until[parent] = max(self.until[parent], self.until[row])

    def _is_used(self, row: int) -> bool:
        if self.children[row]:
            return True
        for copies in self.copies:  # noqa: SIM110 - asked of every block that leaves; a generator costs three times that
            if copies.state[row] != ABSENT or copies.held[row]:
                return True
        return False

    def _grow(self) -> None:
        start = len(self.parent)
        integers = (self.parent, self.depth, self.children, self.tenant, self.kind, self.ends, self.disk, self.origin)
        for column in (*integers, self.last, self.until):
            column.frombytes(bytes(_GROWTH_ROWS * column.itemsize))
        for copies in self.copies:
            copies.grow(_GROWTH_ROWS)
        self._keys.extend(bytes(_GROWTH_ROWS * KEY_BYTES))
        # Popped from the end: low rows first, which keeps the arrays dense and tests readable.
        self._free.extend(range(start + _GROWTH_ROWS - 1, start - 1, -1))

    def check(self) -> None:
        """Raise AssertionError unless keys, parents and child counts agree."""
        children: dict[int, int] = {}
        for key, row in self._index.items():
            assert self.key(row) == key, f"row {row} holds another key"
            assert self._is_used(row), f"row {row} is needed by nothing"
            parent = self.parent[row]
            if parent == NO_ROW:
                assert self.depth[row] == 0, f"row {row} has no parent but depth {self.depth[row]}"
                continue
            assert self._index.get(self.key(parent)) == parent, f"row {row} names a forgotten parent {parent}"
            assert self.depth[row] == self.depth[parent] + 1, f"row {row} is not one below its parent"
            assert self.tenant[row] == self.tenant[parent], f"row {row} is another tenant's than its parent"
            children[parent] = children.get(parent, 0) + 1
        for row in self._index.values():
            assert self.children[row] == children.get(row, 0), f"row {row} miscounts its children"
        assert len(self._index) + len(self._free) == len(self.parent), "rows leaked"
