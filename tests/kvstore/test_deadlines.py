"""Moments at which things are due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.deadlines import STALE_ALLOWED, Deadlines


def test_things_are_taken_in_the_order_they_are_due() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for name, due in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        deadlines.set(name, due)
    assert deadlines.next() == 1.0
    assert deadlines.take_due(2.0) == ["early", "middle"]
    assert (deadlines.next(), len(deadlines)) == (3.0, 1)


def test_a_thing_that_was_moved_or_discarded_is_not_due_at_its_old_moment() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("moved", 1.0)
    deadlines.set("moved", 5.0)
    deadlines.set("gone", 1.0)
    deadlines.discard("gone")
    deadlines.discard("never there")
    assert deadlines.take_due(4.0) == []
    assert deadlines.take_due(5.0) == ["moved"]
    assert deadlines.next() is None


def test_a_thing_moved_away_and_back_is_due_once() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for due in (1.0, 2.0, 1.0):
        deadlines.set("thing", due)
    assert deadlines.take_due(9.0) == ["thing"]
    assert deadlines.next() is None


def test_moving_for_ever_costs_no_memory() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for moment in range(10_000):
        deadlines.set(moment % 10, float(moment))
        assert deadlines.num_entries <= 2 * 10 + STALE_ALLOWED + 1
    assert len(deadlines.take_due(1e9)) == 10


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20) | st.none()), max_size=300))
def test_it_agrees_with_a_plain_dictionary(steps: list[tuple[int, int | None]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    for thing, due in steps:
        if due is None:
            deadlines.discard(thing)
            plain.pop(thing, None)
        else:
            deadlines.set(thing, float(due))
            plain[thing] = float(due)
        assert deadlines.next() == min(plain.values(), default=None)
    taken = deadlines.take_due(10.0)
    assert sorted(taken) == sorted(thing for thing, due in plain.items() if due <= 10)
    assert [plain[thing] for thing in taken] == sorted(plain[thing] for thing in taken)
    assert len(deadlines) == sum(due > 10 for due in plain.values())
