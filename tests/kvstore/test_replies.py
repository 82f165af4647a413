"""What is kept of answers that a client may go on from by id."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvstore import replies
from kvstore.history import History, Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

BARE = History(array("I", [1, 2, 3]), "text", (), 1)


def add(history: History, name: str, previous: str | None = None, before: Sequence[object] = ()) -> History:
    """A turn on `history`'s branch that was answered as `name`."""
    return replies.keep(BARE, history.replies, before, Reply(name, 0.0, previous), [f"ask {name}", name])


def told(history: History, name: str) -> list[object]:
    reply = replies.find(history, name)
    assert reply is not None
    return replies.told(history, reply)


def test_a_reply_is_told_with_all_that_came_before_it() -> None:
    history = add(add(BARE, "a"), "b", "a")
    assert told(history, "b") == ["ask a", "a", "ask b", "b"]
    assert told(history, "a") == ["ask a", "a"]


def test_what_another_branch_has_is_taken_along() -> None:
    history = add(BARE, "c", "a", before=["ask a", "a"])
    assert told(history, "c") == ["ask a", "a", "ask c", "c"]
    assert history.replies[0].previous is None


def test_a_superseded_reply_stays() -> None:
    history = add(add(add(BARE, "a"), "b", "a"), "c", "a")
    assert told(history, "b") == ["ask a", "a", "ask b", "b"]
    assert told(history, "c") == ["ask a", "a", "ask c", "c"]


def test_replies_that_lead_nowhere_are_bounded_and_the_oldest_go() -> None:
    history = add(BARE, "a")
    for number in range(replies.MOST_ASIDE + 10):
        history = add(history, f"b{number}", "a")
    names = [reply.id for reply in history.replies]
    assert len(names) == replies.MOST_ASIDE + 2
    assert names[:2] == ["a", "b9"]


def test_a_history_is_found_by_each_of_its_replies() -> None:
    history = add(add(BARE, "a"), "b", "a")
    assert history.digests == (replies.reply_digest("a"), replies.reply_digest("b"))


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=120))
def test_whatever_is_kept_can_be_told(turns: list[tuple[int, bool]]) -> None:
    history = BARE
    expected: dict[str, list[object]] = {}
    for number, (choice, goes_on) in enumerate(turns):
        known = [reply.id for reply in history.replies]
        previous = known[choice % len(known)] if known and goes_on else None
        before = expected[previous] if previous is not None else []
        name = f"r{number}"
        history = add(history, name, previous)
        expected[name] = [*before, f"ask {name}", name]
        assert history.replies[-1].id == name
        for reply in history.replies:
            assert told(history, reply.id) == expected[reply.id]
