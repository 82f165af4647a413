"""The slots of one tier (pure).

A slot is in exactly one state:

    free          in `_free`
    OPEN          being written by, or private to, one turn: keyless, invisible
    FILLING       target of one live transfer
    VALID         holds the block of one row
    QUARANTINED   target of a transfer that has lost its purpose (late, overtaken) and has not ended
    ERASING       of NVMe: holds bytes that have to go before it is used again

    free -> OPEN -> VALID -> free              a turn's slots, some of them published
            OPEN -> FILLING -> VALID           a transfer brought a row's block
            OPEN -> FILLING -> OPEN            a transfer brought a turn's private block
                    FILLING -> free            it ended unsound
                    FILLING -> QUARANTINED -> free
            VALID or free -> ERASING -> free

A row is on the frontier iff its copy here is VALID, not held (pinned, or with a pinned
descendant) and childless here. Pinning the last row of a run protects its ancestors.
`evictable` counts every VALID row that is not held, so a caller knows what dropping the
coldest again and again would free before it drops anything.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

from kvstore.frontier import Frontier
from kvstore.rows import ABSENT, FILLING, NO_ROW, NO_SLOT, VALID, Rows
from kvstore.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.types import Tier


class Pool:
    """Slots of one tier; keeps the tier's columns of the block table and its counts."""

    def __init__(self, tier: Tier, capacity: int, rows: Rows) -> None:
        self.tier = tier
        self.capacity = capacity
        self.num_open = 0
        self.num_filling = 0
        self.num_valid = 0
        self.num_held = 0  # VALID blocks that a turn or transfer needs, directly or through a descendant
        self.quarantined: set[int] = set()
        self.erasing: set[int] = set()
        self.frontier = Frontier(rows, tier)
        self.shares = Shares(rows.tenancy, self.frontier, capacity)
        self._free = array("i", range(capacity - 1, -1, -1))
        self._rows = rows
        self._copies = rows.copies[tier]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def evictable(self) -> int:
        """VALID blocks that could be dropped one after the other."""
        return self.num_valid - self.num_held

    # --- asking -----------------------------------------------------------------------

    def is_valid(self, row: int) -> bool:
        return self._copies.state[row] == VALID

    def is_present(self, row: int) -> bool:
        """VALID or FILLING here."""
        return self._copies.state[row] != ABSENT

    def is_filling(self, row: int) -> bool:
        return self._copies.state[row] == FILLING

    def may_leave(self, row: int) -> bool:
        """Is `row` on the frontier?"""
        copies = self._copies
        return copies.state[row] == VALID and not copies.held[row] and not copies.kids[row]

    def slot(self, row: int) -> int:
        """The slot that holds `row` here, or will."""
        return self._copies.slot[row]

    def num_kids(self, row: int) -> int:
        """Children of `row` that are present here."""
        return self._copies.kids[row]

    def is_held(self, row: int) -> bool:
        return self._copies.held[row] > 0

    def num_unheld(self, row: int) -> int:
        """Evictable blocks that pinning `row` would protect."""
        return self._count_upwards(row, holders=0)

    def num_held_alone(self, row: int) -> int:
        """Blocks that would become evictable if the only pin of `row` went; 0 when there are more."""
        return self._count_upwards(row, holders=1)

    def num_leaving_with(self, row: int) -> int:
        """Blocks that could leave one after the other, `row` first: as far up as nothing else needs them."""
        copies, parents = self._copies, self._rows.parent
        count = 0
        while row != NO_ROW and not copies.held[row] and copies.kids[row] <= (count > 0):
            count += 1
            row = parents[row]
        return count

    def _count_upwards(self, row: int, holders: int) -> int:
        state, held, parents = self._copies.state, self._copies.held, self._rows.parent
        count = 0
        while row != NO_ROW and held[row] == holders:
            count += state[row] == VALID
            row = parents[row]
        return count

    # --- slots of turns ---------------------------------------------------------------

    def open(self, count: int) -> list[int]:
        """Turn `count` free slots OPEN; there must be as many."""
        assert count <= len(self._free), f"{self.tier.name}: {count} slots wanted, {len(self._free)} free"
        self.num_open += count
        return [self._free.pop() for _ in range(count)]

    def close(self, slots: Sequence[int]) -> None:
        """Free OPEN slots; what they hold is lost."""
        self._free.extend(slots)
        self.num_open -= len(slots)

    def publish(self, row: int, slot: int) -> None:
        """The OPEN `slot` holds the block of `row`, which is absent here: make it VALID."""
        self.num_open -= 1
        self._enter(row, slot)
        self._make_valid(row)

    def overtake(self, row: int, slot: int) -> None:
        """The OPEN `slot` holds the block of `row` before the transfer into FILLING has: that one is quarantined."""
        copies = self._copies
        assert copies.state[row] == FILLING
        self.num_open -= 1
        self.num_filling -= 1
        self.quarantined.add(copies.slot[row])
        copies.slot[row] = slot
        self._make_valid(row)

    def reopen(self, row: int) -> int:
        """Make the VALID copy of `row` OPEN again, private to the turn whose table it is in; its slot."""
        self.num_open += 1
        return self._leave(row)

    def drop(self, row: int) -> None:
        """Free the slot of `row`, which is VALID here."""
        self._free.append(self._leave(row))

    def drop_to_erase(self, row: int) -> int:
        """The slot of `row`, which is VALID here, is ERASING from now on."""
        slot = self._leave(row)
        self.erasing.add(slot)
        return slot

    def erase(self, slot: int) -> None:
        """The free `slot` is ERASING from now on. Costs as many steps as slots are free, unless it was freed last."""
        if self._free[-1] == slot:
            self._free.pop()
        else:
            self._free.remove(slot)
        self.erasing.add(slot)

    def erased(self, slots: Iterable[int]) -> None:
        """ERASING slots are free."""
        for slot in slots:
            self.erasing.remove(slot)
            self._free.append(slot)

    def adopt(self, found: Sequence[tuple[int, int]]) -> None:
        """(row, slot) pairs of an empty tier are VALID: rows absent here, parents first, none pinned."""
        copies, parents = self._copies, self._rows.parent
        slots, state, kids = copies.slot, copies.state, copies.kids
        taken = bytearray(self.capacity)
        tenants, shares = self._rows.tenant, self.shares
        for row, slot in found:
            assert state[row] == ABSENT
            slots[row], state[row] = slot, VALID
            shares.present[tenants[row]] += 1
            shares.unheld[tenants[row]] += 1
            taken[slot] = 1
            parent = parents[row]
            if parent != NO_ROW:
                kids[parent] += 1
        assert sum(taken) == len(found)
        assert len(self._free) == self.capacity
        self._free = array("i", [slot for slot in range(self.capacity - 1, -1, -1) if not taken[slot]])
        self.num_valid = len(found)
        self.frontier.add_all([row for row, _ in found if not kids[row]])

    # --- targets of transfers ---------------------------------------------------------

    def begin_fill(self, row: int, slot: int) -> None:
        """The OPEN `slot` becomes the target of a transfer that brings `row`."""
        self.num_open -= 1
        self.num_filling += 1
        self._enter(row, slot)
        self._copies.state[row] = FILLING

    def finish_fill(self, row: int) -> None:
        """The block of `row` has arrived."""
        self.num_filling -= 1
        self._make_valid(row)

    def abandon_fill(self, row: int, ended: bool) -> None:
        """`row` is absent again. Its slot is free if the transfer has `ended`, else quarantined until it has."""
        copies = self._copies
        assert copies.state[row] == FILLING
        slot = copies.slot[row]
        self.num_filling -= 1
        self.shares.present[self._rows.tenant[row]] -= 1
        copies.state[row] = ABSENT
        copies.slot[row] = NO_SLOT
        self._forget_kid(row)
        if ended:
            self._free.append(slot)
        else:
            self.quarantined.add(slot)

    def begin_private_fill(self, slots: Sequence[int]) -> None:
        """OPEN slots become targets of a transfer of a turn's private blocks."""
        self.num_open -= len(slots)
        self.num_filling += len(slots)

    def finish_private_fill(self, slots: Sequence[int]) -> None:
        """They have arrived, or the transfer ended: OPEN again."""
        self.num_filling -= len(slots)
        self.num_open += len(slots)

    def abandon_private_fill(self, slots: Sequence[int]) -> None:
        """Quarantine them until the transfer has ended."""
        self.num_filling -= len(slots)
        self.quarantined.update(slots)

    def leave_quarantine(self, slot: int) -> None:
        """The transfer into `slot` has ended: nothing writes to it any more."""
        self.quarantined.remove(slot)
        self._free.append(slot)

    def retire(self, slot: int) -> None:
        """The free `slot` is defective: the tier is one slot smaller from now on."""
        self._free.remove(slot)
        self.capacity -= 1
        self.shares.capacity = self.capacity

    # --- protection -------------------------------------------------------------------

    def pin(self, row: int) -> None:
        """Keep `row` and its ancestors here until `unpin`. Costs as many steps as rows become held by it."""
        copies, parents = self._copies, self._rows.parent
        held, state, kids = copies.held, copies.state, copies.kids
        copies.pins[row] += 1
        tenant, unheld = self._rows.tenant[row], self.shares.unheld
        while row != NO_ROW:
            held[row] += 1
            if held[row] > 1:
                return
            if state[row] == VALID:
                self.num_held += 1
                unheld[tenant] -= 1
                if not kids[row]:
                    self.frontier.discard(row)
            row = parents[row]

    def unpin(self, row: int) -> None:
        """Undo one `pin`."""
        copies, parents = self._copies, self._rows.parent
        held, state, kids = copies.held, copies.state, copies.kids
        copies.pins[row] -= 1
        assert copies.pins[row] >= 0, f"{self.tier.name}: row {row} is unpinned twice"
        tenant, unheld = self._rows.tenant[row], self.shares.unheld
        while row != NO_ROW:
            held[row] -= 1
            if held[row]:
                return
            if state[row] == VALID:
                self.num_held -= 1
                unheld[tenant] += 1
                if not kids[row]:
                    self.frontier.add(row)
            row = parents[row]

    def refresh(self, row: int) -> None:
        """`row` may have become less worth keeping here."""
        if self.may_leave(row):
            self.frontier.discard(row)
            self.frontier.add(row)

    # --- inside -----------------------------------------------------------------------

    def _enter(self, row: int, slot: int) -> None:
        copies = self._copies
        assert copies.state[row] == ABSENT, f"{self.tier.name}: row {row} is present already"
        copies.slot[row] = slot
        self.shares.present[self._rows.tenant[row]] += 1
        parent = self._rows.parent[row]
        if parent != NO_ROW:
            if self.may_leave(parent):
                self.frontier.discard(parent)
            copies.kids[parent] += 1

    def _make_valid(self, row: int) -> None:
        copies = self._copies
        self.num_valid += 1
        copies.state[row] = VALID
        if copies.held[row]:
            self.num_held += 1
            return
        self.shares.unheld[self._rows.tenant[row]] += 1
        if not copies.kids[row]:
            self.frontier.add(row)

    def _leave(self, row: int) -> int:
        copies = self._copies
        assert copies.state[row] == VALID, f"{self.tier.name}: row {row} is not VALID"
        tenant = self._rows.tenant[row]
        self.shares.present[tenant] -= 1
        if copies.held[row]:
            self.num_held -= 1
        else:
            self.shares.unheld[tenant] -= 1
            if not copies.kids[row]:
                self.frontier.discard(row)
        slot = copies.slot[row]
        self.num_valid -= 1
        copies.state[row] = ABSENT
        copies.slot[row] = NO_SLOT
        self._forget_kid(row)
        return slot

    def _forget_kid(self, row: int) -> None:
        parent = self._rows.parent[row]
        if parent == NO_ROW:
            return
        self._copies.kids[parent] -= 1
        # A parent is used whenever its child is; this is where it learns so, at no cost per turn.
        self._rows.inherit(parent, row)
        if self.may_leave(parent):
            self.frontier.add(parent)

    # --- laws -------------------------------------------------------------------------

    def check(self, live: Iterable[int]) -> None:
        """Raise AssertionError unless columns, counts and frontier agree over the `live` rows."""
        rows, copies, name = self._rows, self._copies, self.tier.name
        kids: dict[int, int] = {}
        held: dict[int, int] = {}
        deepest_first = sorted(live, key=lambda row: -rows.depth[row])
        for row in deepest_first:
            held[row] = held.get(row, 0) + copies.pins[row]
            parent = rows.parent[row]
            if parent == NO_ROW:
                continue
            if copies.state[row] != ABSENT:
                kids[parent] = kids.get(parent, 0) + 1
            if held[row]:
                held[parent] = held.get(parent, 0) + 1
        for row in deepest_first:
            assert copies.kids[row] == kids.get(row, 0), f"{name}: row {row} miscounts its children"
            assert copies.held[row] == held[row], f"{name}: row {row} is held {copies.held[row]}, not {held[row]}"
        self._check_counts(deepest_first)
        self._check_shares(deepest_first)
        frontier = sorted(row for row in deepest_first if self.may_leave(row))
        assert sorted(self.frontier.rows()) == frontier, f"{name}: {frontier} may leave, not {self.frontier.rows()}"
        assert len(self.frontier) == len(frontier), f"{name}: the frontier is miscounted"

    def _check_counts(self, live: list[int]) -> None:
        copies, name = self._copies, self.tier.name
        used = self.num_open + self.num_filling + self.num_valid + len(self.quarantined) + len(self.erasing)
        assert len(self._free) + used == self.capacity, f"{name}: {len(self._free)} free + {used} used slots"
        valid = [row for row in live if copies.state[row] == VALID]
        assert len(valid) == self.num_valid, f"{name}: {len(valid)} rows VALID, {self.num_valid} counted"
        assert self.num_held == sum(copies.held[row] > 0 for row in valid), f"{name}: held rows are miscounted"
        slots = [copies.slot[row] for row in live if copies.state[row] != ABSENT]
        apart = [*slots, *self._free, *self.quarantined, *self.erasing]
        assert len(set(apart)) == len(apart), f"{name}: a slot has two uses"

    def _check_shares(self, live: list[int]) -> None:
        present: Counter[int] = Counter()
        unheld: Counter[int] = Counter()
        able: Counter[int] = Counter()
        for row in live:
            tenant = self._rows.tenant[row]
            present[tenant] += self.is_present(row)
            unheld[tenant] += self.is_valid(row) and not self.is_held(row)
            able[tenant] += self.may_leave(row)
        self.shares.check(present, unheld)
        assert self.frontier.live == [able[tenant] for tenant in range(len(self.frontier.live))]
        assert self.shares.capacity == self.capacity

    def known_slots(self, live: Iterable[int]) -> list[int]:
        """Every slot but those that belong to turns. For check()."""
        copies = self._copies
        present = [copies.slot[row] for row in live if copies.state[row] != ABSENT]
        return [*present, *self._free, *self.quarantined, *self.erasing]

    def is_free(self, slots: set[int]) -> bool:
        """For check()."""
        return slots <= set(self._free)

    def num_pins(self, row: int) -> int:
        """For check()."""
        return self._copies.pins[row]
