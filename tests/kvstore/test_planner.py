"""The planner with one tier, by scripts: feed events, assert the whole state."""

from __future__ import annotations

import pytest

from kvstore.events import (
    FlushWanted,
    GrantSlots,
    GrantTurn,
    Refusal,
    RefuseGrowth,
    RefuseTurn,
    StepEnded,
    SuspendTurn,
    TurnArrived,
    TurnCancelled,
    TurnStopped,
)
from kvstore.types import StopReason, TurnId
from tests.kvstore.script import Script, granted, suspended

EMPTY = {"free": 8, "open": 0, "valid": 0, "pinned": 0}


def test_a_first_turn_is_granted_open_slots_for_its_prompt_and_a_slice_of_output() -> None:
    script = Script()
    assert script.arrive(1, "ab") == [GrantTurn(TurnId(1), (0, 1, 2, 3), 0, resumed=False)]
    assert script.counts() == {"free": 4, "open": 4, "valid": 0, "pinned": 0}
    assert repr(script.planner) == "<Planner HBM 4/8 | turns 1 active, 0 waiting>"


def test_what_it_filled_stays_for_the_next_turn_and_the_rest_comes_back() -> None:
    script = Script()
    script.run(1, "ab")
    assert script.counts() == {"free": 6, "open": 0, "valid": 2, "pinned": 0}
    assert script.arrive(2, "abc") == [GrantTurn(TurnId(2), (0, 1, 3, 2, 4), 8, resumed=False, reused_blocks=(2, 0, 0))]
    assert script.counts() == {"free": 3, "open": 3, "valid": 2, "pinned": 2}


def test_two_sessions_share_the_blocks_of_their_common_prompt() -> None:
    script = Script()
    script.run(1, "ab")
    script.run(2, "ac")
    assert script.counts()["valid"] == 3


def test_a_block_is_published_only_when_its_step_has_ended() -> None:
    script = Script(hbm_slots=16)
    script.arrive(1, "ab")
    (grant,) = script.arrive(2, "ab")
    assert isinstance(grant, GrantTurn)
    assert grant.cached_tokens == 0
    script.fill(1, 0)
    (grant,) = script.arrive(3, "ab")
    assert isinstance(grant, GrantTurn)
    assert grant.cached_tokens == 4


def test_one_prefix_filled_twice_in_one_step_is_published_once_and_the_second_copy_stays_private() -> None:
    script = Script()
    script.arrive(1, "ab", output_tokens=0)
    script.arrive(2, "ab", output_tokens=0)
    script.feed(StepEnded(script.fills(1, 0, 1) + script.fills(2, 0, 1)))
    assert script.counts() == {"free": 2, "open": 4, "valid": 2, "pinned": 2}
    script.stop(1)
    assert script.counts() == {"free": 3, "open": 3, "valid": 2, "pinned": 2}
    script.stop(2)
    assert script.counts() == {"free": 6, "open": 0, "valid": 2, "pinned": 0}
    assert script.planner.snapshot().totals.duplicate_fills == 2


def test_a_turn_goes_on_publishing_below_a_duplicate() -> None:
    script = Script()
    script.arrive(1, "a", output_tokens=0)
    script.arrive(2, "abc", output_tokens=0)
    script.feed(StepEnded(script.fills(1, 0) + script.fills(2, 0, 1, 2)))
    script.stop(1)
    script.stop(2)
    assert script.cached("abc") == 3


def test_a_turn_that_asked_for_no_cache_neither_reads_nor_keeps() -> None:
    script = Script()
    script.run(1, "ab")
    (grant,) = script.arrive(2, "ab", cache=False)
    assert isinstance(grant, GrantTurn)
    assert grant.cached_tokens == 0
    script.fill(2, 0, 1)
    script.stop(2)
    script.arrive(3, "xy", cache=False)
    script.fill(3, 0, 1)
    script.stop(3)
    assert script.counts() == {"free": 6, "open": 0, "valid": 2, "pinned": 0}


def test_the_least_recent_tail_gives_way_and_nothing_more() -> None:
    script = Script()
    script.run(1, "ab")
    script.now = 1.0
    script.run(2, "xyz")
    script.now = 2.0
    script.arrive(3, "pq")
    assert script.counts() == {"free": 0, "open": 4, "valid": 4, "pinned": 0}
    script.stop(3)
    assert script.cached("ab") == 1
    assert script.cached("xyz") == 3


def test_nothing_is_evicted_for_a_turn_that_would_not_fit_anyway() -> None:
    script = Script()
    script.run(1, "ab")
    script.arrive(2, "pqr", output_tokens=0)
    assert script.arrive(3, "vwxyz") == []
    assert script.counts() == {"free": 2, "open": 4, "valid": 2, "pinned": 0}


def test_a_prompt_that_can_never_fit_is_refused_and_one_that_just_fits_is_not() -> None:
    script = Script(hbm_slots=3)
    assert script.feed(TurnArrived(TurnId(1), (), 12, 4)) == [RefuseTurn(TurnId(1), Refusal.NEVER_FITS)]
    assert granted(script.feed(TurnArrived(TurnId(2), (), 11, 4))) == [2]


def test_a_full_queue_refuses_the_newcomer_and_keeps_the_others() -> None:
    script = Script(max_running=1, max_queue=1)
    script.arrive(1, "a")
    assert script.arrive(2, "b") == []
    assert script.arrive(3, "c") == [RefuseTurn(TurnId(3), Refusal.QUEUE_FULL)]
    assert granted(script.stop(1)) == [2]


def test_with_no_queue_at_all_a_turn_runs_at_once_or_is_refused() -> None:
    script = Script(max_running=1, max_queue=0)
    assert granted(script.arrive(1, "a")) == [1]
    assert script.arrive(2, "b") == [RefuseTurn(TurnId(2), Refusal.QUEUE_FULL)]


def test_the_queue_is_served_by_priority_and_then_by_arrival() -> None:
    script = Script(max_running=1)
    script.arrive(1, "a")
    script.arrive(2, "b", priority=5)
    script.arrive(3, "c", priority=5)
    script.arrive(4, "d", priority=-1)
    assert [granted(script.stop(turn)) for turn in (1, 4, 2)] == [[4], [2], [3]]


def test_a_waiter_that_does_not_fit_blocks_younger_ones_only_once_it_is_old() -> None:
    script = Script(age_limit_seconds=10.0)
    script.arrive(1, "abc", output_tokens=0)
    assert script.arrive(2, "vwxyz") == []
    assert granted(script.arrive(3, "p", output_tokens=0)) == [3]
    assert script.planner.next_timeout() == 10.0
    script.stop(3)
    # The oldest turn is immune, so nothing can be suspended for the waiter; but nobody passes it any more.
    assert script.wait(10.0) == []
    assert script.planner.next_timeout() is None
    assert script.arrive(4, "p", output_tokens=0, priority=-9) == []
    assert granted(script.stop(1)) == [2]


def test_an_old_waiter_makes_younger_turns_give_way_but_not_more_urgent_ones() -> None:
    script = Script(hbm_slots=8, age_limit_seconds=10.0)
    script.arrive(1, "ab", output_tokens=0)
    script.arrive(2, "vwxyz", output_tokens=0)
    script.arrive(3, "p", output_tokens=0, priority=-1)
    script.arrive(4, "q", output_tokens=0)
    assert script.wait(9.9) == []
    script.stop(1)
    # 4 of 8 slots are held, 6 are needed: turn 3 is the oldest and more urgent, turn 4 alone gives two.
    assert suspended(script.wait(0.1)) == [4]
    assert granted(script.stop(4, StopReason.SUSPENDED)) == [2]


def test_a_turn_grows_by_free_slots_then_by_evicting_then_by_suspending_the_youngest() -> None:
    script = Script(hbm_slots=6)
    script.run(1, "z")
    script.arrive(2, "a", output_tokens=3)
    script.arrive(3, "b", output_tokens=3)
    assert script.counts() == {"free": 1, "open": 4, "valid": 1, "pinned": 0}
    assert script.grow(2) == [GrantSlots(TurnId(2), (5,))]
    assert script.grow(2) == [GrantSlots(TurnId(2), (0,))]
    assert script.grow(2) == [SuspendTurn(TurnId(3))]
    assert script.counts() == {"free": 0, "open": 6, "valid": 0, "pinned": 0}
    assert script.stop(3, StopReason.SUSPENDED) == [GrantSlots(TurnId(2), (4,))]


def test_a_wish_for_several_slots_is_settled_with_what_is_there() -> None:
    script = Script(hbm_slots=5)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    assert script.grow(1, 3) == [GrantSlots(TurnId(1), (4,))]
    assert script.planner.handle_timeout(0.0) == []


def test_the_slots_of_a_suspended_turn_are_taken_only_after_its_step_ended() -> None:
    script = Script(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    assert suspended(script.grow(1)) == [2]
    assert script.fill(2, 0) == []  # the victim was inside the running step
    assert script.counts() == {"free": 0, "open": 3, "valid": 1, "pinned": 1}
    assert script.stop(2, StopReason.SUSPENDED) == [GrantSlots(TurnId(1), (3,))]
    assert script.counts() == {"free": 0, "open": 3, "valid": 1, "pinned": 0}


def test_a_suspended_turn_resumes_before_later_arrivals_with_the_blocks_it_had_filled() -> None:
    script = Script(hbm_slots=5, max_running=2)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "pq", output_tokens=3)
    assert script.arrive(3, "x", output_tokens=3) == []
    script.fill(2, 0, 1)
    assert suspended(script.grow(1)) == [2]
    # One slot of turn 2 was open; two hold its blocks, which stay as cache and are not evicted for turn 3.
    assert script.stop(2, StopReason.SUSPENDED, tokens=9) == [GrantSlots(TurnId(1), (4,))]
    turns = script.planner.snapshot().turns
    assert (turns.suspended, turns.waiting, turns.granted) == (1, 1, 1)
    assert script.stop(1) == [
        GrantTurn(TurnId(2), (2, 3, 4), 8, resumed=True, reused_blocks=(2, 0, 0)),
        GrantTurn(TurnId(3), (1, 0), 0, resumed=False),
    ]
    assert script.planner.snapshot().totals.turns_resumed == 1


@pytest.mark.parametrize(("tokens", "cached_tokens"), [(9, 8), (8, 4)], ids=["one token past", "at the block's end"])
def test_a_resumed_turn_looks_up_its_own_output_but_computes_its_last_token(tokens: int, cached_tokens: int) -> None:
    script = Script(hbm_slots=5)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "p", output_tokens=7)
    script.fill(2, 0, 1, path="pq")
    assert suspended(script.grow(1)) == [2]
    script.stop(2, StopReason.SUSPENDED, tokens=tokens)
    (grant,) = script.stop(1)
    assert isinstance(grant, GrantTurn)
    assert (grant.cached_tokens, grant.resumed) == (cached_tokens, True)


def test_the_youngest_turn_suspends_itself_when_it_cannot_grow() -> None:
    script = Script(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    assert suspended(script.grow(2)) == [2]
    assert script.grow(1) == []
    assert script.stop(2, StopReason.SUSPENDED) == [GrantSlots(TurnId(1), (3,))]


def test_the_oldest_turn_is_never_suspended_and_is_told_when_it_has_everything() -> None:
    script = Script(hbm_slots=3)
    script.arrive(1, "a", output_tokens=40)
    assert script.counts() == {"free": 0, "open": 3, "valid": 0, "pinned": 0}
    assert script.grow(1) == [RefuseGrowth(TurnId(1))]


def test_a_turn_alone_can_use_every_slot_even_after_filling_what_another_had_published() -> None:
    script = Script(hbm_slots=8)
    script.arrive(1, "abc", output_tokens=40)
    script.arrive(2, "ab", output_tokens=0)
    script.feed(StepEnded(script.fills(2, 0, 1) + script.fills(1, 0, 1, 2)))
    script.stop(2)
    # Turn 1 holds private copies of two blocks whose published copies its third block depends on.
    assert script.counts() == {"free": 1, "open": 4, "valid": 3, "pinned": 3}
    assert script.grow(1, 3) == [GrantSlots(TurnId(1), (7,))]
    (grown,) = script.grow(1, 2)
    assert isinstance(grown, GrantSlots)
    assert len(grown.slots) == 2
    assert script.counts() == {"free": 0, "open": 8, "valid": 0, "pinned": 0}
    script.fill(1, 3, path="abcd")
    script.stop(1)
    assert script.counts() == EMPTY


def test_two_turns_never_suspend_each_other_in_turn() -> None:
    script = Script(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    victims: list[int] = []
    for _ in range(20):
        for turn in (2, 1):
            for victim in suspended(script.grow(turn)):
                victims.append(victim)
                script.stop(victim, StopReason.SUSPENDED)
        script.wait(1.0)
    assert set(victims) == {2}


def test_a_queued_turn_that_is_cancelled_is_gone_at_once() -> None:
    script = Script(max_running=1)
    script.arrive(1, "a")
    script.arrive(2, "b")
    assert script.feed(TurnCancelled(TurnId(2))) == []
    assert script.planner.snapshot().turns.waiting == 0
    assert script.stop(1) == []


def test_a_granted_turn_that_is_cancelled_keeps_its_slots_until_it_stopped() -> None:
    script = Script()
    script.arrive(1, "ab")
    script.fill(1, 0)
    script.feed(TurnCancelled(TurnId(1)))
    assert script.counts() == {"free": 4, "open": 3, "valid": 1, "pinned": 1}
    script.stop(1, StopReason.CANCELLED)
    assert script.counts() == {"free": 7, "open": 0, "valid": 1, "pinned": 0}


def test_a_turn_cancelled_while_it_is_being_suspended_does_not_come_back() -> None:
    script = Script(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    assert suspended(script.grow(1)) == [2]
    script.feed(TurnCancelled(TurnId(2)))
    script.stop(2, StopReason.SUSPENDED)
    assert script.planner.snapshot().turns.suspended == 0
    assert script.stop(1) == []


def test_a_turn_cancelled_while_it_waits_to_resume_is_gone_at_once() -> None:
    script = Script(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    script.grow(1)
    script.stop(2, StopReason.SUSPENDED)
    script.feed(TurnCancelled(TurnId(2)))
    assert script.planner.snapshot().turns.suspended == 0
    assert script.stop(1) == []


def test_a_turn_that_stopped_by_itself_while_it_was_being_suspended_is_done() -> None:
    script = Script(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    script.grow(1)
    script.stop(2, StopReason.STOP)
    assert script.planner.snapshot().turns.suspended == 0


def test_events_that_come_after_their_turn_ended_change_nothing() -> None:
    script = Script()
    script.run(1, "ab")
    before = script.planner.snapshot()
    assert script.grow(1) == []
    assert script.feed(TurnCancelled(TurnId(1))) == []
    assert script.planner.snapshot() == before


def test_a_failed_turn_leaves_what_earlier_steps_published() -> None:
    script = Script()
    script.arrive(1, "ab")
    script.fill(1, 0)
    script.stop(1, StopReason.FAILED)
    assert script.cached("ab") == 1


def test_flushing_drops_what_nobody_needs_and_leaves_running_turns_alone() -> None:
    script = Script()
    script.run(1, "abc")
    script.run(2, "xy")
    script.arrive(3, "ab", output_tokens=0)
    script.feed(FlushWanted())
    assert script.counts() == {"free": 5, "open": 1, "valid": 2, "pinned": 2}
    script.stop(3)
    script.feed(FlushWanted())
    assert script.counts() == EMPTY


def test_a_clock_that_jumps_back_ages_nobody_and_breaks_nothing() -> None:
    script = Script(max_running=1, age_limit_seconds=10.0)
    script.now = 100.0
    script.arrive(1, "a")
    script.now = 3.0
    script.arrive(2, "b")
    assert script.planner.next_timeout() == 110.0
    assert granted(script.stop(1)) == [2]


@pytest.mark.parametrize("reason", [StopReason.STOP, StopReason.LENGTH, StopReason.CANCELLED, StopReason.FAILED])
def test_when_nothing_runs_no_pin_and_no_open_slot_is_left(reason: StopReason) -> None:
    script = Script()
    script.arrive(1, "ab")
    script.arrive(2, "ac")
    script.feed(
        StepEnded(
            script.fills(1, 0, 1) + script.fills(2, 0),
            (TurnStopped(TurnId(1), reason, 9), TurnStopped(TurnId(2), reason, 9)),
        )
    )
    assert script.counts() == {"free": 6, "open": 0, "valid": 2, "pinned": 0}
