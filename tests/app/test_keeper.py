"""Book and store are told the same: what a branch has, what it left, what is gone."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from app.keeper import Keeper, Written, written
from kvstore import chain
from kvstore.history import History
from kvstore.sessions import SessionBook
from kvstore.terms import SILENT, Persist, Wishes
from tests.app.recording import RecordingStore

if TYPE_CHECKING:
    from kvstore.session import OpenTurn

BLOCK = 4
SPACE = chain.namespace(b"m", "", None)


def ids(length: int, last: int = 0) -> array[int]:
    """Tokens that many share, but for the last few where `last` is given."""
    return array("I", [*range(1, length), last or length])


class Bench:
    def __init__(self, max_sessions: int = 100) -> None:
        self.store = RecordingStore()
        self.book = SessionBook(max_sessions=max_sessions, max_branches=4)
        self.now = 0.0
        self.keeper = Keeper(self.book, self.store, clock=lambda: self.now)

    def begin(self, session_id: str, token_ids: array[int], wishes: Wishes = SILENT) -> OpenTurn:
        return self.keeper.begin("", session_id, token_ids, wishes=wishes)

    def end(self, turn: OpenTurn, token_ids: array[int], computed: int | None = None) -> Written:
        blocks = written(
            token_ids,
            BLOCK,
            SPACE,
            computed_tokens=computed if computed is not None else len(token_ids) - 1,
            history_tokens=len(token_ids),
        )
        self.keeper.record(turn, History(token_ids, "", (), 2), blocks)
        return blocks

    def run(self, session_id: str, token_ids: array[int], wishes: Wishes = SILENT) -> OpenTurn:
        turn = self.begin(session_id, token_ids[:-1], wishes)
        self.end(turn, token_ids)
        return turn

    def check(self) -> None:
        self.store.check_in_step_with(self.book)


def keys(length: int) -> tuple[bytes, ...]:
    return tuple(chain.extend(None, ids(length), BLOCK, SPACE))


def test_the_last_token_of_a_history_has_no_block_and_what_lies_past_it_is_not_its_own() -> None:
    whole = written(ids(12), BLOCK, SPACE, computed_tokens=8, history_tokens=9)
    assert (whole.keys, whole.own, whole.beyond) == (keys(8), 2, ())
    short = written(ids(13), BLOCK, SPACE, computed_tokens=12, history_tokens=8)
    assert (short.keys, short.own, short.beyond) == (keys(12), 1, keys(12)[1:])
    left = written(ids(13), BLOCK, SPACE, computed_tokens=9)
    assert (left.keys, left.own) == (keys(8), 0)


async def test_a_branch_that_moves_on_takes_its_tip_along() -> None:
    bench = Bench()
    bench.run("s", ids(9))
    bench.run("s", ids(17))
    first, second = bench.store.recorded
    assert (first.tip, first.old_tip, second.tip, second.old_tip) == (keys(8)[-1], None, keys(16)[-1], keys(8)[-1])
    assert second.superseded == ()
    bench.check()


async def test_what_was_written_past_a_stop_string_is_closed_with_the_branch() -> None:
    bench = Bench()
    turn = bench.begin("s", ids(6))
    blocks = written(ids(17), BLOCK, SPACE, computed_tokens=16, history_tokens=9)
    bench.keeper.record(turn, History(ids(9), "", (), 2), blocks)
    (told,) = bench.store.recorded
    assert (told.tip, told.superseded) == (keys(8)[-1], keys(16)[2:])
    bench.check()


async def test_both_an_old_tail_and_one_cut_off_are_told() -> None:
    bench = Bench()
    bench.run("s", ids(17))
    old = bench.store.recorded[0].tip
    turn = bench.begin("s", ids(6))
    other = array("I", [*range(1, 7), *range(50, 70)])
    blocks = written(other, BLOCK, SPACE, computed_tokens=20, history_tokens=10)
    bench.keeper.record(turn, History(other[:10], "", (), 2), blocks)
    first, second = bench.store.recorded[1:]
    assert (first.old_tip, first.superseded[-1]) == (old, old)
    assert (second.tip, second.old_tip, second.superseded) == (first.tip, first.tip, blocks.beyond)
    bench.check()


async def test_a_history_too_short_for_a_block_leaves_no_block_behind() -> None:
    bench = Bench()
    turn = bench.begin("s", ids(2))
    bench.keeper.record(
        turn, History(ids(3), "", (), 2), written(ids(9), BLOCK, SPACE, computed_tokens=8, history_tokens=3)
    )
    assert bench.store.closed == [keys(8)[-1]]
    bench.check()


async def test_a_turn_that_did_not_complete_leaves_its_blocks_to_go_with_the_branch() -> None:
    bench = Bench()
    bench.run("s", ids(9))
    turn = bench.begin("s", ids(14))
    bench.keeper.abandon(turn, written(ids(14), BLOCK, SPACE, computed_tokens=13))
    told = bench.store.recorded[-1]
    assert (told.tip, told.old_tip, told.superseded) == (keys(8)[-1], keys(8)[-1], keys(12)[2:])
    bench.check()


@pytest.mark.parametrize(("wishes", "closes"), [(SILENT, False), (Wishes(expire_seconds=9.0), True)])
async def test_a_first_turn_that_did_not_complete_leaves_a_cache_unless_it_promised_none(
    wishes: Wishes, closes: bool
) -> None:
    bench = Bench()
    turn = bench.begin("s", ids(14), wishes)
    bench.keeper.abandon(turn, written(ids(14), BLOCK, SPACE, computed_tokens=13))
    assert bench.store.closed == ([keys(12)[-1]] if closes else [])
    bench.check()


async def test_a_turn_that_leaves_nothing_closes_its_blocks_and_its_branchs() -> None:
    bench = Bench()
    bench.run("s", ids(9))
    turn = bench.begin("s", ids(14), Wishes(persist=Persist.NONE))
    bench.keeper.abandon(turn, written(ids(14), BLOCK, SPACE, computed_tokens=13))
    assert bench.store.closed == [keys(8)[-1], keys(12)[-1]]
    assert len(bench.book) == 0
    bench.check()


async def test_a_turn_that_never_ran_takes_nothing_along() -> None:
    bench = Bench()
    bench.run("s", ids(9))
    bench.keeper.abandon(bench.begin("s", ids(14), Wishes(persist=Persist.NONE)))
    assert bench.store.closed == []
    assert len(bench.book) == 1
    bench.check()


@pytest.mark.parametrize("completes", [True, False])
async def test_a_session_deleted_during_its_turn_leaves_nothing(completes: bool) -> None:
    bench = Bench()
    bench.run("s", ids(9))
    turn = bench.begin("s", ids(14))
    bench.keeper.forget("", "s")
    if completes:
        bench.end(turn, ids(14))
    else:
        bench.keeper.abandon(turn, written(ids(14), BLOCK, SPACE, computed_tokens=13))
    assert bench.store.closed == [keys(8)[-1], keys(12)[-1]]
    bench.check()


async def test_two_sessions_with_the_same_tip_are_two_branches_of_it() -> None:
    bench = Bench()
    bench.run("s", ids(9))
    bench.run("t", ids(9))
    bench.keeper.forget("", "s")
    bench.check()
    assert +bench.store.tips == {keys(8)[-1]: 1}


async def test_five_hundred_forks_share_one_history_and_one_tip() -> None:
    bench = Bench(max_sessions=1000)
    session = bench.run("s", ids(2001)).session
    history = session.branches[0].history
    for number in range(500):
        fork = bench.keeper.fork("", "s", f"fork-{number}", None)
        assert fork.branches[0].history is history
        assert fork.branches[0].keys is session.branches[0].keys
    assert len({event.tip for event in bench.store.recorded}) == 1
    bench.check()


async def test_whoever_makes_room_is_closed() -> None:
    bench = Bench(max_sessions=2)
    for number in range(4):
        bench.run(f"s{number}", ids(9, last=90 + number))
        bench.check()
    bench.keeper.fork("", "s3", "fork", None)
    bench.check()
    for number in range(8):  # branches
        bench.run("s3", array("I", [1, 200 + number, *range(20)]))
        bench.check()
    assert await bench.keeper.forget_all("") == 2
    assert not +bench.store.tips


async def test_what_expires_is_closed() -> None:
    bench = Bench()
    bench.run("s", ids(9), Wishes(expire_seconds=5.0))
    bench.now = 4.9
    bench.keeper.expire()
    assert bench.store.closed == []
    bench.now = 5.0
    bench.keeper.expire()
    assert bench.store.closed == [keys(8)[-1]]
    bench.keeper.close()
    bench.check()


@pytest.mark.parametrize(("persist", "to_nvme"), [(Persist.DISK, True), (Persist.MEMORY, False)])
async def test_the_store_is_told_what_may_lie_on_nvme(persist: Persist, to_nvme: bool) -> None:
    bench = Bench()
    bench.run("s", ids(9), Wishes(persist=persist))
    bench.keeper.fork("", "s", "t", None)
    assert [event.to_nvme for event in bench.store.recorded] == [to_nvme, to_nvme]


async def test_what_is_dropped_at_once_is_at_no_moment_allowed_on_nvme() -> None:
    bench = Bench()
    turn = bench.begin("s", ids(14), Wishes(persist=Persist.NONE))
    bench.keeper.abandon(turn, written(ids(14), BLOCK, SPACE, computed_tokens=13))
    assert [event.to_nvme for event in bench.store.recorded] == [False]
