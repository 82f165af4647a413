"""The interleavings that have gone wrong for others, each as a script of events.

Nothing is copied ahead of need here, so that a script sees only the transfers it means.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.events import (
    AnswerWake,
    BranchRecorded,
    CancelTransfer,
    GrantSlots,
    GrantTurn,
    Miss,
    SessionClosed,
    SleepWanted,
    StepEnded,
    TransferDone,
    TransferEnd,
    TurnCancelled,
    WakeHinted,
    WakeStatus,
)
from kvstore.types import StopReason, Tier, TransferId, TurnId, WakeId
from tests.kvstore.script import Script, copies, granted, keys, suspended, the_grant


def tiered(hbm_slots: int = 8, dram_slots: int = 16, **more: Any) -> Script:
    return Script(hbm_slots=hbm_slots, dram_slots=dram_slots, clean_share=0.0, hbm_high=1.0, **more)


def test_01_a_late_load_lands_after_its_turn_has_computed_and_published_the_same_blocks() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert (load.source, load.target, load.deadline) == (Tier.DRAM, Tier.HBM, 2.0)
    actions = script.wait(2.0)
    assert CancelTransfer(load.transfer) in actions
    assert the_grant(actions).cached_tokens == 0
    assert the_grant(actions).miss is Miss.LOAD_TIMEOUT
    script.fill(1, 0, 1)
    assert script.slots(Tier.HBM) == {"free": 3, "open": 1, "valid": 2, "quarantined": 2, "pinned": 2}
    script.end(load.transfer)
    assert script.slots(Tier.HBM) == {"free": 5, "open": 1, "valid": 2, "pinned": 2}
    script.stop(1)
    assert script.where("ab") == ["HD", "HD"]


def test_01_a_load_overtaken_by_another_turns_fill_leaves_that_copy_alone() -> None:
    script = tiered(max_running=8)
    script.put_to_sleep("ab")
    (late,) = copies(script.arrive(1, "ab", output_tokens=0))
    script.wait(2.0)
    (load,) = copies(script.arrive(2, "ab", output_tokens=0))
    # Turn 1 computes what turn 2 is loading: the fill is there first, and turn 2 goes on with it.
    assert the_grant(script.fill(1, 0, 1)).cached_tokens == 8
    assert script.slots(Tier.HBM)["quarantined"] == 4
    script.end(load.transfer)
    script.end(late.transfer)
    assert script.slots(Tier.HBM) == {"free": 4, "open": 2, "valid": 2, "pinned": 2}


def test_02_two_turns_share_one_load_and_the_first_is_cancelled() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert script.arrive(2, "ab", output_tokens=0) == []
    assert script.feed(TurnCancelled(TurnId(1))) == []
    assert the_grant(script.end(load.transfer)).turn == 2
    script.stop(2)
    assert script.slots(Tier.HBM) == {"free": 6, "valid": 2}


def test_02_a_load_that_nobody_waits_for_any_more_is_cancelled_and_still_owns_its_slots() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert script.feed(TurnCancelled(TurnId(1))) == [CancelTransfer(load.transfer)]
    assert script.slots(Tier.HBM) == {"free": 6, "filling": 2}
    script.end(load.transfer, good=1, reason=TransferEnd.CANCELLED)
    assert script.where("ab") == ["HD", "D"]


def test_03_one_prefix_filled_twice_in_one_step_while_it_is_being_loaded_too() -> None:
    script = tiered(hbm_slots=12)
    script.put_to_sleep("ab")
    script.arrive(1, "ab", output_tokens=0)
    script.arrive(2, "ab", output_tokens=0)
    assert granted(script.wait(2.0)) == [1, 2]
    script.feed(StepEnded(script.fills(1, 0, 1) + script.fills(2, 0, 1)))
    assert script.slots(Tier.HBM) == {"free": 4, "open": 4, "valid": 2, "quarantined": 2, "pinned": 2}
    script.stop(1)
    script.stop(2)
    script.end_all()
    assert script.slots(Tier.HBM) == {"free": 10, "valid": 2}


def test_04_the_victim_of_a_suspension_fills_a_block_in_the_running_step_and_keeps_all_it_computed() -> None:
    script = tiered(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    assert suspended(script.grow(1)) == [2]
    script.fill(2, 0)
    (tail,) = copies(script.stop(2, StopReason.SUSPENDED, tokens=8, computed=7))
    assert (tail.source, tail.target, tail.keys) == (Tier.HBM, Tier.DRAM, (None,))
    # Its slot is safe to reuse only when the copy has ended.
    assert script.end(tail.transfer) == [GrantSlots(TurnId(1), (3,))]
    (load,) = copies(script.stop(1))
    assert (load.source, load.keys) == (Tier.DRAM, (None,))
    grant = the_grant(script.end(load.transfer))
    assert (grant.turn, grant.cached_tokens, grant.resumed) == (2, 7, True)
    assert script.slots(Tier.DRAM) == {"free": 16}


def test_05_the_client_of_a_suspended_turn_leaves_while_its_tail_is_on_its_way() -> None:
    script = tiered(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    script.grow(1)
    (tail,) = copies(script.stop(2, StopReason.SUSPENDED, tokens=5, computed=3))
    script.feed(TurnCancelled(TurnId(2)))
    assert script.slots(Tier.DRAM) == {"free": 15, "filling": 1}
    script.end(tail.transfer)
    script.stop(1)
    assert script.slots(Tier.DRAM) == {"free": 16}
    assert script.slots(Tier.HBM) == {"free": 4}


def test_06_the_next_turn_arrives_while_its_blocks_are_copied_down_and_keeps_its_hbm_copy() -> None:
    script = tiered()
    script.run(1, "ab")
    (copy,) = copies(script.feed(SleepWanted(keys("ab"))))
    grant = the_grant(script.arrive(2, "ab"))
    assert (grant.cached_tokens, grant.reused_blocks) == (8, (2, 0, 0))
    script.now += 1.0
    script.end(copy.transfer)
    assert script.where("ab") == ["HD", "HD"]
    script.stop(2)
    assert script.where("ab") == ["HD", "HD"]


def test_07_hbm_and_dram_each_drop_the_others_other_copy_in_one_call() -> None:
    script = tiered(hbm_slots=3, dram_slots=1)
    script.put_to_sleep("a")
    script.now = 1.0
    script.run(2, "c")
    script.now = 2.0
    script.arrive(3, "a", output_tokens=0)
    script.end_all()
    script.stop(3)
    assert (script.where("a"), script.where("c")) == (["HD"], ["H"])
    script.now = 3.0
    # For c to go down the duplicate of a goes from DRAM; then a, now the only copy, has nowhere to go.
    script.arrive(4, "xy", output_tokens=0)
    script.end_all()
    assert script.planner.snapshot().turns.waking == 0
    assert (script.where("a"), script.where("c")) == ([""], ["D"])


def test_08_a_corrupt_block_in_the_middle_of_a_run_is_dropped_and_what_is_sound_before_it_used() -> None:
    script = tiered(hbm_slots=12)
    script.put_to_sleep("abcdefgh")
    (load,) = copies(script.arrive(1, "abcdefgh", output_tokens=0))
    assert len(load.keys) == 8
    grant = the_grant(script.end(load.transfer, good=4, reason=TransferEnd.CORRUPT))
    assert (grant.cached_tokens, grant.reused_blocks, grant.miss) == (16, (0, 4, 0), Miss.CORRUPT)
    assert script.where("abcdefgh") == ["HD"] * 4 + [""] * 4, (
        "nobody knows of the rest, and all of it is computed again"
    )
    script.fill(1, 4, 5, 6, 7)
    assert script.where("abcdefgh") == ["HD"] * 4 + ["H"] * 4


def test_08_a_slot_that_holds_another_block_is_an_eviction_found_late_and_no_corruption() -> None:
    script = tiered(hbm_slots=12)
    script.put_to_sleep("abcd")
    (load,) = copies(script.arrive(1, "abcd", output_tokens=0))
    grant = the_grant(script.end(load.transfer, good=1, reason=TransferEnd.STALE))
    assert (grant.cached_tokens, grant.miss) == (4, Miss.STALE)
    assert script.where("abcd") == ["HD", "", "", ""]
    totals = script.planner.snapshot().totals
    assert (totals.stale, totals.corrupt, totals.loads_failed) == (1, 0, 1)


def test_08_the_run_that_follows_a_failed_one_is_given_up_with_it_even_if_it_ended_first() -> None:
    script = tiered(hbm_slots=16)
    script.put_to_sleep("abcdefghij")
    first, second = copies(script.arrive(1, "abcdefghij", output_tokens=0))
    assert script.end(second.transfer) == []
    assert script.where("abcdefghij") == ["D"] * 10, "blocks behind a gap are not VALID in HBM"
    grant = the_grant(script.end(first.transfer, good=3, reason=TransferEnd.FAILED))
    assert (grant.cached_tokens, grant.miss) == (12, Miss.LOAD_FAILED)
    assert script.where("abcdefghij") == ["HD"] * 3 + ["D"] * 7
    assert script.slots(Tier.HBM) == {"free": 5, "open": 8, "valid": 3, "pinned": 3}


def test_09_a_session_closed_and_reopened_keeps_what_it_uses_again_when_the_old_copy_ends() -> None:
    script = tiered()
    script.run(1, "ab")
    script.feed(BranchRecorded(keys("ab")[-1]))
    (copy,) = copies(script.feed(SleepWanted(keys("ab"))))
    script.now = 1.0
    script.feed(SessionClosed((keys("ab")[-1],)))
    script.now = 2.0
    assert the_grant(script.arrive(2, "ab")).cached_tokens == 8
    script.end(copy.transfer)
    script.stop(2)
    assert script.where("ab") == ["HD", "HD"]


def test_09_a_session_closed_during_a_copy_frees_its_slots_when_that_has_ended() -> None:
    script = tiered()
    script.run(1, "ab")
    (copy,) = copies(script.feed(SleepWanted(keys("ab"))))
    script.feed(SessionClosed((keys("ab")[-1],)))
    assert script.slots(Tier.HBM) == {"free": 6, "valid": 2, "pinned": 2}
    script.end(copy.transfer)
    assert script.slots(Tier.HBM) == {"free": 8}
    assert script.slots(Tier.DRAM) == {"free": 16}


def test_10_with_dram_dirty_and_nvme_hung_a_turn_waits_one_deadline_and_then_only_for_dram() -> None:
    script = tiered(dram_slots=2, nvme_slots=8, dram_high=1.0)
    script.put_to_sleep("ab")
    script.record("ab")
    for turn, path in ((2, "cde"), (3, "fgh")):
        script.now += 1.0
        script.run(turn, path)
        script.record(path)
    script.now += 1.0
    (hung,) = copies(script.arrive(4, "uvwx", output_tokens=0))
    assert (hung.source, hung.target, len(hung.keys), len(hung.ring_slots)) == (Tier.HBM, Tier.NVME, 3, 3)
    # A tier that did not answer gets nothing more: DRAM's blocks make room for hotter ones, the rest is dropped.
    (down,) = copies(script.wait(2.0))
    assert (down.target, len(down.keys)) == (Tier.DRAM, 2)
    assert granted(script.end(down.transfer)) == [4]
    assert (script.where("ab"), script.where("cde"), script.where("fgh")) == (["", ""], ["H"] * 3, ["", "D", "D"])
    script.stop(4)
    assert granted(script.arrive(5, "pqr", output_tokens=0)) == [5]
    script.stop(5)
    assert script.slots(Tier.NVME) == {"free": 5, "quarantined": 3}
    script.end(hung.transfer)
    assert script.slots(Tier.NVME) == {"free": 8}


def test_11_eviction_passes_over_a_block_that_is_being_read() -> None:
    script = tiered(hbm_slots=3, dram_slots=2)
    script.put_to_sleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    # DRAM is full of the blocks being read: what has to leave HBM finds no room there and is dropped.
    script.feed(SleepWanted(keys("ab")))
    assert script.slots(Tier.DRAM) == {"valid": 2, "pinned": 2}
    assert the_grant(script.end(load.transfer)).cached_tokens == 8


def test_12_a_hint_is_cancelled_past_the_point_where_the_prompt_diverges() -> None:
    script = tiered(hbm_slots=16)
    script.put_to_sleep("abcdefghij")
    actions = script.feed(WakeHinted(WakeId(7), keys("abcdefghij"), Tier.HBM, 30.0))
    near, far = copies(actions)
    assert AnswerWake(WakeId(7), WakeStatus.WAKING, 40, Tier.DRAM) in actions
    actions = script.arrive(1, "abx", output_tokens=0, wake=WakeId(7))
    assert actions == [AnswerWake(WakeId(7), WakeStatus.AWAKE, 0, Tier.DRAM), CancelTransfer(far.transfer)]
    assert the_grant(script.end(near.transfer)).reused_blocks == (0, 2, 0)
    script.end(far.transfer, good=0, reason=TransferEnd.CANCELLED)
    script.stop(1)
    assert script.planner.snapshot().hints == 0


@pytest.mark.parametrize("first", ["deadline", "success"])
def test_13_the_deadline_and_the_success_of_a_load_come_at_the_same_moment(first: str) -> None:
    script = tiered()
    script.put_to_sleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    script.now = load.deadline
    if first == "deadline":
        assert the_grant(script.wait(0.0)).cached_tokens == 0
        script.end(load.transfer)
    else:
        assert the_grant(script.end(load.transfer)).cached_tokens == 8
        assert script.wait(0.0) == []
    script.stop(1)
    assert script.slots(Tier.HBM) == {"free": 8 if first == "deadline" else 6} | (
        {"valid": 2} if first == "success" else {}
    )


def test_14_a_title_request_between_two_turns_of_a_long_branch_costs_it_no_block() -> None:
    script = tiered(hbm_slots=12)
    history = "abcdefghij"
    script.run(1, history)
    script.now = 1.0
    script.arrive(2, "title", output_tokens=0)
    script.end_all()
    script.fill(2, 0, 1, 2, 3, 4)
    script.stop(2)
    script.now = 2.0
    actions = script.arrive(3, history)
    actions += script.end_all()
    grant = the_grant(actions)
    assert grant.cached_tokens == len(history) * 4
    assert sum(grant.reused_blocks) == 10
    assert grant.reused_blocks[Tier.DRAM] > 0


def test_15_a_fork_while_the_tail_is_open_shares_what_is_full_and_nothing_else() -> None:
    script = tiered()
    script.arrive(1, "abc", output_tokens=0)
    script.fill(1, 0, 1)
    grant = the_grant(script.arrive(2, "abc", output_tokens=0))
    assert grant.cached_tokens == 8
    assert grant.slots[:2] == (0, 1)
    assert not {*grant.slots[2:]} & {2, 3}
    script.stop(1)
    assert script.slots(Tier.HBM) == {"free": 4, "open": 2, "valid": 2, "pinned": 2}


def test_16_quarantine_takes_the_whole_tier_and_drains() -> None:
    script = tiered(hbm_slots=4)
    script.put_to_sleep("abc")
    (load,) = copies(script.arrive(1, "abc", output_tokens=0))
    assert granted(script.wait(2.0)) == [], "three of four slots are still being written to"
    assert script.slots(Tier.HBM) == {"open": 1, "quarantined": 3}
    assert script.arrive(2, "x") == []
    assert granted(script.end(load.transfer)) == [1]
    assert granted(script.stop(1)) == [2]


def test_17_a_wake_under_way_when_a_drain_begins_is_finished_and_leaves_nothing_behind() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    script.arrive(1, "ab", output_tokens=0)
    script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.HBM, 1.0))
    assert granted(script.end_all()) == [1]
    script.stop(1)
    snapshot = script.planner.snapshot()
    assert (snapshot.transfers, snapshot.hints, snapshot.turns.granted) == (0, 0, 0)
    assert script.slots(Tier.HBM) == {"free": 6, "valid": 2}


def test_18_a_clock_that_jumps_back_makes_no_transfer_late_and_none_immortal() -> None:
    script = tiered()
    script.now = 100.0
    script.put_to_sleep("ab")
    script.now = 50.0
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert load.deadline == 102.0
    assert script.wait(0.0) == []
    script.now = 102.0
    assert granted(script.wait(0.0)) == [1]
    script.end(load.transfer)


def test_an_unknown_transfer_is_an_error_of_ours() -> None:
    script = tiered()
    with pytest.raises(KeyError):
        script.feed(TransferDone(TransferId(99), 0))


def test_a_turn_whose_blocks_are_all_below_is_granted_in_the_call_that_finds_them_up() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert script.slots(Tier.HBM) == {"free": 5, "open": 1, "filling": 2}
    assert script.slots(Tier.DRAM) == {"free": 14, "valid": 2, "pinned": 2}
    (grant,) = script.end(load.transfer)
    assert isinstance(grant, GrantTurn)
    assert grant.slots[:2] == load.target_slots
    assert (len(grant.slots), grant.cached_tokens, grant.reused_blocks) == (3, 8, (0, 2, 0))
