from __future__ import annotations

import pytest

from kvstore.policy import Kind
from kvstore.pool import Pool
from kvstore.rows import NO_ROW, Rows
from kvstore.types import Tier
from tests.kvstore.test_rows import chain


class Shelf:
    """One pool over its own rows."""

    def __init__(self, capacity: int = 16) -> None:
        self.rows = Rows(tiers=1)
        self.pool = Pool(Tier.HBM, capacity, self.rows)

    def put(self, path: str, now: float, kind: Kind = Kind.NORMAL) -> int:
        """Publish what is missing of `path`, used last at `now`; its last row."""
        row = NO_ROW
        for row in chain(self.rows, path):
            if not self.pool.is_valid(row):
                self.pool.publish(row, self.pool.open(1)[0])
        self.rows.now = now
        self.pool.pin(row)
        self.rows.kind[row] = kind
        self.rows.touch(row, kind, until=now + 100.0)
        self.pool.unpin(row)
        self.check()
        return row

    def drain(self) -> list[int]:
        """Drop the coldest until nothing may leave; the rows in that order."""
        dropped = []
        while (row := self.pool.frontier.coldest()) != NO_ROW:
            self.pool.drop(row)
            dropped.append(row)
            self.check()
        return dropped

    def check(self) -> None:
        self.pool.check(list(self.rows))


def test_tails_leave_before_prefixes_and_a_chain_leaves_as_one() -> None:
    shelf = Shelf()
    old, new = shelf.put("abc", now=1.0), shelf.put("xyz", now=2.0)
    assert shelf.drain() == [old, old - 1, old - 2, new, new - 1, new - 2]


def test_a_shared_prefix_is_as_recent_as_the_last_chain_through_it() -> None:
    shelf = Shelf()
    shelf.put("ab", now=1.0)
    other = shelf.put("x", now=2.0)
    shelf.put("ac", now=3.0)
    dropped = shelf.drain()
    assert dropped.index(other) < dropped.index(chain(shelf.rows, "a")[0])


def test_superseded_tails_leave_first_and_take_no_shared_history_along() -> None:
    shelf = Shelf()
    shelf.put("z", now=1.0)
    stale = shelf.put("ab", now=9.0, kind=Kind.SUPERSEDED)
    root = chain(shelf.rows, "a")[0]
    shelf.rows.touch(root)
    z = chain(shelf.rows, "z")[0]
    assert shelf.drain() == [stale, z, root]


@pytest.mark.parametrize("kind", [Kind.KEPT, Kind.PINNED])
def test_what_was_asked_to_stay_leaves_last_but_leaves(kind: Kind) -> None:
    shelf = Shelf()
    kept = shelf.put("k", now=1.0, kind=kind)
    other = shelf.put("o", now=2.0)
    assert shelf.drain() == [other, kept]


def test_pinning_a_last_row_protects_its_ancestors_and_counts_them() -> None:
    shelf = Shelf()
    row = shelf.put("abc", now=1.0)
    shelf.put("abx", now=2.0)
    shelf.pool.pin(row)
    shelf.check()
    assert (shelf.pool.num_valid, shelf.pool.evictable) == (4, 1)
    assert len(shelf.drain()) == 1
    shelf.pool.unpin(row)
    assert len(shelf.drain()) == 3


def test_a_row_touched_while_it_may_leave_is_taken_for_what_it_is_now() -> None:
    shelf = Shelf()
    first, second = shelf.put("a", now=1.0), shelf.put("b", now=2.0)
    shelf.rows.now = 3.0
    shelf.rows.touch(first)
    assert shelf.drain() == [second, first]


def test_ten_thousand_pins_and_unpins_leave_a_queue_of_bounded_length() -> None:
    shelf = Shelf()
    row = shelf.put("a", now=1.0)
    for _ in range(10_000):
        shelf.pool.pin(row)
        shelf.pool.unpin(row)
    assert shelf.pool.frontier.num_entries < 2_000
    assert shelf.drain() == [row]


def test_a_slot_is_opened_closed_and_opened_again() -> None:
    shelf = Shelf(capacity=2)
    slots = shelf.pool.open(2)
    assert sorted(slots) == [0, 1]
    assert shelf.pool.num_free == 0
    shelf.pool.close(slots)
    assert shelf.pool.num_free == 2
    shelf.check()


def test_a_row_kept_for_a_while_leaves_like_any_other_afterwards() -> None:
    shelf = Shelf()
    kept = shelf.put("k", now=1.0, kind=Kind.KEPT)
    other = shelf.put("o", now=2.0)
    shelf.rows.now = 101.5
    assert shelf.drain() == [kept, other]


def test_the_first_of_the_kept_to_expire_is_found_below_one_that_is_kept_longer() -> None:
    shelf = Shelf()
    shelf.put("a", now=1.0, kind=Kind.KEPT)
    longer = chain(shelf.rows, "a")[0]
    shelf.rows.until[longer] = 1_000.0
    shelf.pool.refresh(longer)
    sooner = shelf.put("b", now=2.0, kind=Kind.KEPT)
    other = shelf.put("o", now=150.0)
    shelf.rows.now = 150.0
    assert shelf.drain() == [sooner, other, longer]


def test_what_hbm_holds_as_well_leaves_dram_first_and_only_as_long_as_it_does() -> None:
    rows = Rows(tiers=2)
    hbm, dram = Pool(Tier.HBM, 4, rows), Pool(Tier.DRAM, 4, rows)
    cold, hot = chain(rows, "a")[0], chain(rows, "b")[0]
    for now, row in enumerate((cold, hot)):
        rows.now = rows.last[row] = float(now)
        dram.publish(row, dram.open(1)[0])
    hbm.publish(hot, hbm.open(1)[0])
    dram.refresh(hot)
    assert dram.frontier.coldest() == hot
    hbm.drop(hot)
    assert dram.frontier.coldest() == cold


def test_a_fill_that_is_overtaken_leaves_its_slot_in_quarantine_until_the_copy_has_ended() -> None:
    shelf = Shelf(capacity=2)
    row = chain(shelf.rows, "a")[0]
    target, own = shelf.pool.open(2)
    shelf.pool.begin_fill(row, target)
    shelf.pool.overtake(row, own)
    shelf.check()
    assert (shelf.pool.slot(row), shelf.pool.quarantined, shelf.pool.num_free) == (own, {target}, 0)
    shelf.pool.leave_quarantine(target)
    shelf.check()
    assert shelf.pool.num_free == 1


def test_a_retired_slot_makes_its_tier_smaller() -> None:
    shelf = Shelf(capacity=2)
    (slot,) = shelf.pool.open(1)
    shelf.pool.close([slot])
    shelf.pool.retire(slot)
    shelf.check()
    assert (shelf.pool.capacity, shelf.pool.num_free) == (1, 1)
    assert shelf.pool.open(1) != [slot]
