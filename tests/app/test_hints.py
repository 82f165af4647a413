"""Hints: how many, for how long, and how long they take."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from app.hints import HINTS_AT_ONCE, Hints, Pace, Rate
from kvstore import chain
from kvstore.events import WakeStatus
from kvstore.history import History
from kvstore.sessions import SessionBook
from kvstore.types import Tier
from tests.app.recording import RecordingStore

if TYPE_CHECKING:
    from kvstore.session import Session


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def remembered(book: SessionBook, session_id: str = "s") -> Session:
    token_ids = array("I", range(64))
    turn = book.begin("", session_id, token_ids, 0.0)
    keys = chain.extend(None, token_ids, 16, chain.namespace(b"m", "", None))
    book.record(turn, History(token_ids, "text", (), 10), 0.0, chain.pack(keys))
    return turn.session


def test_a_rate_allows_a_burst_and_then_so_many_a_second() -> None:
    clock = Clock()
    rate = Rate(2.0, 3.0, clock)
    assert [rate.take() for _ in range(4)] == [True, True, True, False]
    clock.now = 1.0
    assert [rate.take() for _ in range(3)] == [True, True, False]
    clock.now = 100.0
    assert [rate.take() for _ in range(4)] == [True, True, True, False]


def test_the_pace_of_wakes_is_unknown_until_one_was_seen() -> None:
    pace = Pace()
    pace.observe(Tier.HBM, 100, 1.0)  # nothing was loaded
    pace.observe(Tier.DRAM, 0, 1.0)
    assert pace.estimate(Tier.DRAM, 100) is None
    pace.observe(Tier.DRAM, 100, 1.0)
    assert pace.estimate(Tier.DRAM, 200) == 2.0
    pace.observe(Tier.DRAM, 100, 2.0)
    assert 1.0 < (pace.estimate(Tier.DRAM, 100) or 0.0) < 2.0
    assert pace.estimate(Tier.NVME, 100) is None


async def test_a_newer_hint_takes_the_place_of_an_older_one_without_a_gap() -> None:
    store, book = RecordingStore(), SessionBook()
    store.answer = WakeStatus.WAKING
    hints, session = Hints(store, Clock()), remembered(book)
    first = hints.give(session, session.branches[0], Tier.DRAM, 30.0)
    second = hints.give(session, session.branches[0], Tier.HBM, 60.0)
    assert [wake.is_cancelled for wake in store.wakes] == [True, False]
    assert (first.hold_until, second.hold_until) == (30.0, 60.0)
    assert hints.withdraw(session) == [second]
    assert hints.withdraw(session) == []


async def test_a_hint_whose_time_is_over_is_not_told_of_as_withdrawn() -> None:
    store, book, clock = RecordingStore(), SessionBook(), Clock()
    hints, session = Hints(store, clock), remembered(book)
    hints.give(session, session.branches[0], Tier.HBM, 30.0)
    clock.now = 31.0
    assert hints.withdraw(session) == []


async def test_a_hint_that_was_declined_is_not_remembered() -> None:
    store, book = RecordingStore(), SessionBook()
    store.answer = WakeStatus.NO_ROOM
    hints, session = Hints(store, Clock()), remembered(book)
    hints.give(session, session.branches[0], Tier.HBM, 30.0)
    assert hints.withdraw(session) == []


def test_the_burst_is_what_it_says() -> None:
    hints = Hints(RecordingStore(), Clock())
    assert sum(hints.has_room() for _ in range(2 * int(HINTS_AT_ONCE))) == HINTS_AT_ONCE
