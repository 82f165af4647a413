from __future__ import annotations

import gc

from kvstore.rows import NO_ROW, VALID, Rows
from tests.kvstore.script import keys


def chain(rows: Rows, path: str) -> list[int]:
    """Rows of `path`, those that were missing added."""
    parent, found = NO_ROW, []
    for key in keys(path):
        row = rows.find(key)
        if row == NO_ROW:
            row = rows.add(key, parent, rows.tenancy.index(""))
        found.append(row)
        parent = row
    return found


def test_chains_share_the_rows_of_what_they_share() -> None:
    rows = Rows(tiers=1)
    left, right = chain(rows, "abc"), chain(rows, "abx")
    assert left[:2] == right[:2]
    assert left[2] != right[2]
    assert [rows.depth[row] for row in left] == [0, 1, 2]
    assert rows.children[left[1]] == 2


def test_a_row_that_nothing_needs_takes_its_unused_ancestors_along() -> None:
    rows = Rows(tiers=1)
    a, b, c = chain(rows, "abc")
    x = chain(rows, "ax")[-1]
    rows.copies[0].state[x] = VALID
    rows.forget_unused(c)
    assert rows.find(keys("abc")[2]) == NO_ROW
    assert rows.find(keys("ab")[1]) == NO_ROW
    assert rows.find(keys("a")[0]) == a
    assert b != x
    rows.check()


def test_a_forgotten_row_is_used_again() -> None:
    rows = Rows(tiers=1)
    (row,) = chain(rows, "a")
    rows.forget_unused(row)
    assert chain(rows, "b") == [row]
    assert rows.key(row) == keys("b")[0]


def test_a_hundred_thousand_rows_give_the_garbage_collector_nothing_to_visit() -> None:
    gc.collect()
    before = len(gc.get_objects())
    rows = Rows(tiers=2)
    tenant = rows.tenancy.index("")
    for number in range(100_000):
        rows.add(number.to_bytes(16, "little"), NO_ROW, tenant)  # type: ignore[arg-type]
    gc.collect()
    assert len(gc.get_objects()) - before < 100
