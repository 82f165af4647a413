"""The interleavings of test_interleavings.py with NVMe as the only tier below HBM, through ring slots.

4 and 5 are about private blocks, which NVMe does not take; 7 needs DRAM; 15 has no lower tier in it.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.events import (
    AnswerWake,
    CancelTransfer,
    FlushDown,
    ForgetBlocks,
    Miss,
    RecordBlocks,
    SessionClosed,
    SleepWanted,
    StepEnded,
    TransferEnd,
    TurnCancelled,
    WakeHinted,
    WakeStatus,
)
from kvstore.types import StopReason, Tier, TurnId, WakeId
from tests.kvstore.script import Script, copies, granted, keys, suspended, the_grant


def ringed(hbm_slots: int = 8, nvme_slots: int = 16, ring_slots: int = 16, **more: Any) -> Script:
    return Script(
        hbm_slots=hbm_slots,
        nvme_slots=nvme_slots,
        ring_slots=ring_slots,
        **({"clean_share": 0.0, "hbm_high": 1.0} | more),
    )


def asleep(path: str, **more: Any) -> Script:
    script = ringed(**more)
    script.put_to_sleep_in_nvme(path)
    return script


def recorded(path: str, **more: Any) -> Script:
    """A turn has computed `path`, and its branch is recorded."""
    script = ringed(**more)
    script.run(1, path)
    script.record(path)
    return script


def test_01_a_late_load_lands_after_its_turn_has_computed_and_published_the_same_blocks() -> None:
    script = asleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert (load.source, load.target, load.ring_slots) == (Tier.NVME, Tier.HBM, (15, 14))
    actions = script.wait(2.0)
    assert CancelTransfer(load.transfer) in actions
    assert the_grant(actions).miss is Miss.LOAD_TIMEOUT
    script.fill(1, 0, 1)
    assert script.slots(Tier.HBM) == {"free": 3, "open": 1, "valid": 2, "quarantined": 2, "pinned": 2}
    script.end(load.transfer)
    script.stop(1)
    assert script.where("ab") == ["HN", "HN"]
    assert script.slots(Tier.HBM) == {"free": 6, "valid": 2}


def test_02_two_turns_share_one_load_and_the_first_is_cancelled() -> None:
    script = asleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert script.arrive(2, "ab", output_tokens=0) == []
    assert script.feed(TurnCancelled(TurnId(1))) == []
    assert the_grant(script.end(load.transfer)).reused_blocks == (0, 0, 2)
    script.stop(2)
    assert script.slots(Tier.HBM) == {"free": 6, "valid": 2}


def test_02_a_load_that_nobody_waits_for_any_more_keeps_its_ring_slots_until_it_has_ended() -> None:
    script = asleep("ab", ring_slots=2)
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert script.feed(TurnCancelled(TurnId(1))) == [CancelTransfer(load.transfer)]
    assert script.arrive(2, "ab", output_tokens=0) == [], "it joins what is under way"
    (again,) = copies(script.end(load.transfer, good=0, reason=TransferEnd.CANCELLED))
    assert again.ring_slots == load.ring_slots[::-1]
    assert the_grant(script.end(again.transfer)).cached_tokens == 8


def test_03_one_prefix_filled_twice_in_one_step_while_it_is_being_loaded_too() -> None:
    script = asleep("ab", hbm_slots=12)
    script.arrive(1, "ab", output_tokens=0)
    script.arrive(2, "ab", output_tokens=0)
    assert granted(script.wait(2.0)) == [1, 2]
    script.feed(StepEnded(script.fills(1, 0, 1) + script.fills(2, 0, 1)))
    script.stop(1)
    script.stop(2)
    script.end_all()
    assert script.slots(Tier.HBM) == {"free": 10, "valid": 2}
    assert script.where("ab") == ["HN", "HN"]


def test_06_the_next_turn_arrives_while_its_blocks_are_copied_down_and_keeps_its_hbm_copy() -> None:
    script = recorded("ab")
    (copy,) = copies(script.feed(SleepWanted(keys("ab"), Tier.NVME)))
    assert the_grant(script.arrive(2, "ab")).reused_blocks == (2, 0, 0)
    script.now += 1.0
    assert [type(action) for action in script.end(copy.transfer)] == [RecordBlocks]
    script.stop(2)
    assert script.where("ab") == ["HN", "HN"]


@pytest.mark.parametrize(
    ("reason", "miss", "counter"),
    [(TransferEnd.CORRUPT, Miss.CORRUPT, "corrupt"), (TransferEnd.STALE, Miss.STALE, "stale")],
)
def test_08_a_block_that_does_not_verify_is_dropped_and_what_is_sound_before_it_used(
    reason: TransferEnd, miss: Miss, counter: str
) -> None:
    script = asleep("abcdefgh", hbm_slots=12)
    (load,) = copies(script.arrive(1, "abcdefgh", output_tokens=0))
    actions = script.end(load.transfer, good=4, reason=reason)
    grant = the_grant(actions)
    assert (grant.cached_tokens, grant.reused_blocks, grant.miss) == (16, (0, 0, 4), miss)
    assert ForgetBlocks(load.source_slots[4:], erase=False) in actions
    assert script.where("abcdefgh") == ["HN"] * 4 + [""] * 4, (
        "nobody knows of the rest, and all of it is computed again"
    )
    assert getattr(script.planner.snapshot().totals, counter) == 1
    script.fill(1, 4, 5, 6, 7)
    assert script.where("abcdefgh") == ["HN"] * 4 + ["H"] * 4


def test_a_turn_is_told_why_a_block_is_gone_that_its_own_hint_found_bad_and_dropped() -> None:
    script = asleep("abcdefgh", hbm_slots=12)
    (load,) = copies(script.feed(WakeHinted(WakeId(1), keys("abcdefgh"), Tier.HBM, 30.0)))
    script.end(load.transfer, good=4, reason=TransferEnd.CORRUPT)
    assert script.where("e") == [""]
    grant = the_grant(script.arrive(1, "abcdefgh", output_tokens=0))
    assert (grant.cached_tokens, grant.miss) == (16, Miss.CORRUPT)
    script.fill(1, 4, 5, 6, 7)
    script.stop(1)
    assert the_grant(script.arrive(2, "abcdefgh", output_tokens=0)).miss is None


def test_08_a_slot_that_cannot_be_read_is_retired_and_its_block_forgotten() -> None:
    script = asleep("abc")
    (load,) = copies(script.arrive(1, "abc", output_tokens=0))
    script.end(load.transfer, good=1, reason=TransferEnd.SLOT_BROKEN)
    assert script.planner.snapshot().tier(Tier.NVME).capacity == 15
    assert script.where("abc") == ["HN", "", "N"]


def test_08_a_slot_that_cannot_be_written_is_retired_and_the_block_goes_to_another_one_later() -> None:
    script = recorded("abc", tier_backoff_seconds=5.0)
    (down,) = copies(script.feed(SleepWanted(keys("abc"), Tier.NVME)))
    assert copies(script.end(down.transfer, good=1, reason=TransferEnd.SLOT_BROKEN)) == []
    assert script.planner.next_timeout() == 5.0
    (again,) = copies(script.wait(5.0))
    assert again.keys == keys("abc")[1:]
    assert down.target_slots[1] not in again.target_slots
    script.end_all()
    assert script.where("abc") == ["HN", "HN", "HN"], "sleeping gave up when the disk took nothing; writing went on"


def test_08_the_run_that_follows_a_failed_one_is_given_up_with_it_even_if_it_ended_first() -> None:
    script = asleep("abcdefghij", hbm_slots=16)
    first, second = copies(script.arrive(1, "abcdefghij", output_tokens=0))
    script.end(second.transfer)
    assert script.where("abcdefghij") == ["N"] * 10, "blocks behind a gap are not VALID in HBM"
    grant = the_grant(script.end(first.transfer, good=3, reason=TransferEnd.FAILED))
    assert (grant.cached_tokens, grant.miss) == (12, Miss.LOAD_FAILED)
    assert script.where("abcdefghij") == ["HN"] * 3 + ["N"] * 7


def test_09_a_session_closed_while_it_is_written_is_erased_as_soon_as_that_has_ended() -> None:
    script = recorded("ab")
    (down,) = copies(script.feed(SleepWanted(keys("ab"), Tier.NVME)))
    script.now = 1.0
    script.feed(SessionClosed((keys("ab")[-1],)))
    assert script.slots(Tier.NVME) == {"free": 14, "filling": 2}
    script.end(down.transfer)
    assert script.where("ab") == ["", ""]
    assert script.slots(Tier.NVME) == {"free": 14, "erasing": 2}
    script.erase_all()
    assert script.slots(Tier.NVME) == {"free": 16}


def test_09_a_session_closed_and_opened_again_keeps_what_it_uses_but_not_on_nvme_until_it_is_recorded() -> None:
    script = recorded("ab")
    (down,) = copies(script.feed(SleepWanted(keys("ab"), Tier.NVME)))
    script.now = 1.0
    script.feed(SessionClosed((keys("ab")[-1],)))
    script.now = 2.0
    assert the_grant(script.arrive(2, "ab")).cached_tokens == 8
    script.end(down.transfer)
    script.stop(2)
    assert script.where("ab") == ["H", "H"]
    script.record("ab")
    script.feed(SleepWanted(keys("ab"), Tier.NVME))
    script.end_all()
    assert script.where("ab") == ["N", "N"]


def test_10_with_nvme_hung_and_hbm_exhausted_a_turn_waits_one_deadline_and_then_for_nothing() -> None:
    script = recorded("abc", hbm_slots=4)
    (hung,) = copies(script.arrive(2, "wxyz"[:3], output_tokens=0))
    assert (hung.target, len(hung.keys)) == (Tier.NVME, 3)
    assert granted(script.wait(2.0)) == [], "its sources are still being read"
    script.end(hung.transfer, good=0, reason=TransferEnd.FAILED)
    assert 2 in script.running
    script.stop(2)
    assert granted(script.arrive(3, "pqr", output_tokens=0)) == [3], "what NVMe does not take is dropped at once"


def test_11_on_quota_the_coldest_go_and_never_what_is_being_read() -> None:
    script = asleep("ab", hbm_slots=12, nvme_slots=4)
    script.now = 1.0
    script.put_to_sleep_in_nvme("cd")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    script.now = 2.0
    script.run(2, "xyz")
    script.record("xyz")
    script.feed(SleepWanted(keys("xyz"), Tier.NVME))
    script.end(max(script.copies))
    assert (script.where("ab"), script.where("cd")) == (["N", "N"], ["", ""])
    assert script.where("xyz") == ["HN", "HN", "H"], "for its last block NVMe has no room"
    assert the_grant(script.end(load.transfer)).reused_blocks == (0, 0, 2)


def test_12_a_hint_is_cancelled_past_the_point_where_the_prompt_diverges() -> None:
    script = asleep("abcdefghij", hbm_slots=16)
    near, far = copies(script.feed(WakeHinted(WakeId(7), keys("abcdefghij"), Tier.HBM, 30.0)))
    actions = script.arrive(1, "abx", output_tokens=0, wake=WakeId(7))
    assert actions == [AnswerWake(WakeId(7), WakeStatus.AWAKE, 0, Tier.NVME), CancelTransfer(far.transfer)]
    assert the_grant(script.end(near.transfer)).reused_blocks == (0, 0, 2)
    script.end(far.transfer, good=0, reason=TransferEnd.CANCELLED)


@pytest.mark.parametrize("first", ["deadline", "success"])
def test_13_the_deadline_and_the_success_of_a_load_come_at_the_same_moment(first: str) -> None:
    script = asleep("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    script.now = load.deadline
    if first == "deadline":
        assert the_grant(script.wait(0.0)).cached_tokens == 0
        script.end(load.transfer)
    else:
        assert the_grant(script.end(load.transfer)).cached_tokens == 8
    script.stop(1)
    assert script.slots(Tier.HBM) == ({"free": 8} if first == "deadline" else {"free": 6, "valid": 2})


def test_14_a_title_request_between_two_turns_of_a_long_branch_costs_it_no_block() -> None:
    script = recorded("abcdefghij", hbm_slots=12)
    script.now = 1.0
    script.arrive(2, "title", output_tokens=0)
    script.end_all()
    script.fill(2, 0, 1, 2, 3, 4)
    script.stop(2)
    script.now = 2.0
    grant = the_grant(script.arrive(3, "abcdefghij") + script.end_all())
    assert grant.cached_tokens == 40
    assert grant.reused_blocks[Tier.NVME] > 0


def test_16_quarantine_takes_the_whole_tier_and_drains() -> None:
    script = asleep("abc", hbm_slots=4)
    (load,) = copies(script.arrive(1, "abc", output_tokens=0))
    assert granted(script.wait(2.0)) == []
    assert script.slots(Tier.HBM) == {"open": 1, "quarantined": 3}
    assert script.arrive(2, "x") == []
    assert granted(script.end(load.transfer)) == [1]
    assert granted(script.stop(1)) == [2]


def test_16_slots_of_nvme_that_are_erased_are_as_good_as_absent_until_they_are() -> None:
    script = asleep("ab", nvme_slots=2)
    script.now = 1.0
    script.feed(SessionClosed((keys("ab")[-1],)))
    script.run(2, "xy")
    script.record("xy")
    assert copies(script.feed(SleepWanted(keys("xy"), Tier.NVME))) == []
    (down,) = copies(script.erase_all())
    script.end(down.transfer)
    assert script.where("xy") == ["N", "N"]


def test_17_a_wake_under_way_when_a_drain_begins_is_finished_and_what_it_adds_is_written() -> None:
    script = asleep("ab")
    script.arrive(1, "abc", output_tokens=0)
    script.feed(FlushDown(10.0))
    assert granted(script.end_all()) == [1]
    script.fill(1, 2)
    script.stop(1)
    (down,) = copies(script.record("abc", old="ab"))
    assert down.keys == keys("abc")[2:]
    script.end_all()
    assert script.where("abc") == ["HN", "HN", "HN"]


def test_18_a_clock_that_jumps_back_makes_no_transfer_late_and_none_immortal() -> None:
    script = ringed()
    script.now = 100.0
    script.put_to_sleep_in_nvme("ab")
    script.now = 50.0
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert load.deadline == 102.0
    assert script.wait(0.0) == []
    script.now = 102.0
    assert granted(script.wait(0.0)) == [1]
    script.end(load.transfer)


@pytest.mark.parametrize("to_nvme", [True, False])
def test_a_suspended_turn_keeps_its_full_blocks_on_nvme_only_if_they_may_lie_there(to_nvme: bool) -> None:
    script = ringed(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3, to_nvme=to_nvme)
    script.fill(2, 0)
    assert suspended(script.grow(1, 2)) == [2]
    script.stop(2, StopReason.SUSPENDED, tokens=8, computed=7)
    script.end_all()
    if to_nvme:
        script.grow(1)
    assert script.where("b") == (["N"] if to_nvme else [""])
    actions = script.stop(1) + script.end_all()
    assert the_grant(actions).cached_tokens == (4 if to_nvme else 0)
    script.stop(2)
    assert script.where("b") == (["HN"] if to_nvme else [""])
    script.settle(2)
    assert script.where("b") == (["H"] if to_nvme else [""]), "its branch says what becomes of it now"
    script.erase_all()
    assert script.slots(Tier.NVME) == {"free": 16}


@pytest.mark.parametrize("to_nvme", [True, False])
def test_what_an_ended_turn_computed_goes_to_nvme_for_who_waits_before_its_branch_is_recorded(to_nvme: bool) -> None:
    script = Script(hbm_slots=3, nvme_slots=8, ring_slots=4)
    script.arrive(1, "ab", output_tokens=3, to_nvme=to_nvme)
    script.fill(1, 0, 1)
    script.arrive(2, "xy", output_tokens=3)
    script.stop(1, tokens=10)
    script.end_all()
    assert script.running == {2}
    assert script.where("ab") == (["N", "N"] if to_nvme else ["", ""])
    script.record("ab", to_nvme=to_nvme)
    script.settle(1)
    script.erase_all()
    assert script.where("ab") == (["N", "N"] if to_nvme else ["", ""])


def test_an_ended_turn_that_nobody_records_leaves_nothing_on_nvme() -> None:
    script = Script(hbm_slots=3, nvme_slots=8, ring_slots=4)
    script.arrive(1, "ab", output_tokens=3, to_nvme=True)
    script.fill(1, 0, 1)
    script.arrive(2, "xy", output_tokens=3)
    script.stop(1, tokens=10)
    script.end_all()
    assert script.where("ab") == ["N", "N"]
    script.settle(1)
    script.erase_all()
    assert script.where("ab") == ["", ""]
    assert script.slots(Tier.NVME) == {"free": 8}
