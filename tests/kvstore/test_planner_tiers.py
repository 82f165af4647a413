"""Sleeping, waking, hints, tails and branches, by scripts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.config import PlannerConfig
from kvstore.events import (
    AnswerWake,
    BranchRecorded,
    CancelTransfer,
    FlushDown,
    FlushWanted,
    GrantTurn,
    SessionClosed,
    SleepWanted,
    TierHealth,
    TierHealthChanged,
    TransferEnd,
    WakeCancelled,
    WakeHinted,
    WakeStatus,
    WritePolicy,
)
from kvstore.types import StopReason, Tier, WakeId
from tests.kvstore.script import Script, copies, granted, hurried, keys, suspended, the_grant
from tests.kvstore.world import World


def tiered(hbm_slots: int = 8, dram_slots: int = 16, **more: Any) -> Script:
    """Nothing is copied ahead of need unless asked for."""
    return Script(hbm_slots=hbm_slots, dram_slots=dram_slots, **({"clean_share": 0.0, "hbm_high": 1.0} | more))


# --- sleeping ---------------------------------------------------------------------------


def test_under_pressure_the_coldest_tail_goes_down_and_the_turn_is_granted_when_it_is_there() -> None:
    script = tiered()
    script.run(1, "abc")
    script.now = 1.0
    script.run(2, "xyz")
    script.now = 2.0
    (copy,) = copies(script.arrive(3, "pqr", output_tokens=0))
    assert copy.keys == keys("abc")[1:]
    assert repr(script.planner) == "<Planner HBM 8/8 DRAM 2/16 | turns 1 active, 0 waiting | transfers 1>"
    assert granted(script.end(copy.transfer)) == [3]
    assert script.where("abc") == ["H", "D", "D"]
    assert script.planner.snapshot().totals.evicted == 0


def test_clean_blocks_leave_without_io() -> None:
    script = tiered(clean_share=0.5)
    script.run(1, "abcdef")
    script.end_all()
    assert script.where("abcdef") == ["HD"] * 6
    assert granted(script.arrive(2, "vwxy", output_tokens=0)) == [2]
    assert script.where("abcdef") == ["HD"] * 3 + ["D"] * 3


def test_the_cleaner_copies_the_coldest_chains_top_down_one_run_at_a_time_until_a_share_is_at_hand() -> None:
    script = tiered(hbm_slots=24, dram_slots=64, clean_share=0.5)
    script.run(1, "abcdefghij")
    assert script.copies == {}, "more than half of HBM is free"
    script.now = 1.0
    script.run(2, "klmno")
    (first,) = script.copies.values()
    assert first.keys == keys("abcdefghij")[:8]
    (second,) = copies(script.end(first.transfer))
    assert second.keys == keys("abcdefghij")[8:]
    assert copies(script.end(second.transfer)) == [], "9 slots are free and 10 clean"
    assert script.where("klmno") == ["H"] * 5


def test_the_cleaner_takes_only_free_slots_of_dram() -> None:
    script = tiered(hbm_slots=4, dram_slots=3, clean_share=1.0)
    script.put_to_sleep("yz")
    script.now = 1.0
    script.run(1, "abc")
    script.end_all()
    assert (script.where("abc"), script.where("yz")) == (["HD", "H", "H"], ["D", "D"])


def test_above_the_high_watermark_the_coldest_blocks_move_down_until_the_low_one() -> None:
    script = tiered(hbm_slots=10, dram_slots=4, hbm_high=0.6, hbm_low=0.5)
    script.put_to_sleep("abcd")
    script.now = 1.0
    script.run(2, "pqrst")
    assert script.copies == {}, "5 of 10 slots are in use"
    script.now = 2.0
    script.run(3, "wx")
    (copy,) = script.copies.values()
    assert copy.keys == keys("pqrst")[1:], "while it ran 9 slots were in use"
    script.end_all()
    assert (script.where("pqrst"), script.where("wx")) == (["H", "D", "D", "D", "D"], ["H", "H"])
    assert script.where("abcd") == ["", "", "", ""], "colder blocks made room for them"
    script.now = 3.0
    script.run(4, "y")
    assert script.copies == {}, "6 of 10 slots were in use, which is between the two"


def test_duplicates_of_what_hbm_holds_are_the_first_to_leave_dram() -> None:
    script = tiered(hbm_slots=8, dram_slots=4)
    script.put_to_sleep("ab")
    script.now = 1.0
    script.put_to_sleep("xy")
    script.now = 2.0
    script.arrive(1, "xy", output_tokens=0)
    script.end_all()
    script.stop(1)
    script.now = 3.0
    script.run(2, "c")
    script.feed(SleepWanted(keys("c")))
    script.end_all()
    assert (script.where("ab"), script.where("xy"), script.where("c")) == (["D", "D"], ["HD", "H"], ["D"])


def test_what_the_tier_below_does_not_take_in_time_is_dropped_when_room_is_needed() -> None:
    script = tiered(hbm_slots=8)
    script.run(1, "abc")
    script.now = 1.0
    script.run(2, "xyz")
    (copy,) = copies(script.arrive(3, "pqr", output_tokens=0))
    actions = script.wait(2.0)
    assert CancelTransfer(copy.transfer) in actions
    assert granted(actions) == [3], "other blocks were dropped at once"
    assert script.where("xyz") == ["H", "", ""]
    assert script.slots(Tier.DRAM) == {"free": 14, "quarantined": 2}
    script.end(copy.transfer)
    assert script.slots(Tier.DRAM) == {"free": 16}
    assert script.where("abc") == ["H", "H", "H"], "a late copy leaves its source where it is"


def test_a_tier_that_is_off_is_neither_read_nor_written() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    script.feed(TierHealthChanged(Tier.DRAM, TierHealth.OFF))
    grant = the_grant(script.arrive(1, "ab", output_tokens=0))
    assert grant.cached_tokens == 0
    script.fill(1, 0, 1)
    script.stop(1)
    script.feed(SleepWanted(keys("ab")))
    assert script.copies == {}
    script.feed(TierHealthChanged(Tier.DRAM, TierHealth.OK))
    assert script.where("ab") == ["HD", "HD"]


def test_a_broken_slot_is_retired() -> None:
    script = tiered()
    script.run(1, "ab")
    (copy,) = copies(script.feed(SleepWanted(keys("ab"))))
    script.end(copy.transfer, good=1, reason=TransferEnd.SLOT_BROKEN)
    counts = script.planner.snapshot().tier(Tier.DRAM)
    assert (counts.capacity, counts.valid) == (15, 1)
    assert script.where("ab") == ["HD", "H"]


def test_every_run_says_where_in_its_chain_it_lies() -> None:
    script = tiered(hbm_slots=16, dram_slots=32)
    script.run(1, "abcdefghij")
    started = copies(script.feed(SleepWanted(keys("abcdefghij"))))
    while script.copies:
        started += copies(script.end(next(iter(script.copies))))
    for copy in started:
        first = keys("abcdefghij").index(copy.keys[0])
        assert copy.first_block == first
        assert copy.parent == (keys("abcdefghij")[first - 1] if first else None)
        assert copy.keys == keys("abcdefghij")[first : first + len(copy.keys)]
    assert {copy.first_block for copy in started} == {0, 2}, "ten blocks are more than one run, tails first"


def test_sleep_moves_a_chain_down_run_by_run_and_stops_where_others_use_it() -> None:
    script = tiered(hbm_slots=16, dram_slots=32)
    script.run(1, "abcdefghij")
    script.run(2, "abx")
    script.feed(SleepWanted(keys("abcdefghij")))
    script.end_all()
    assert script.where("abcdefghij") == ["H", "H"] + ["D"] * 8
    assert script.where("abx") == ["H", "H", "H"]


# --- waking -----------------------------------------------------------------------------


def test_a_long_wake_is_loaded_in_runs_as_io_tokens_allow() -> None:
    script = tiered(hbm_slots=32, dram_slots=32, max_transfers=2)
    path = "abcdefghijklmnopqrst"
    script.put_to_sleep(path)
    first, second = copies(script.arrive(1, path, output_tokens=0))
    assert [len(first.keys), len(second.keys)] == [8, 8]
    (third,) = copies(script.end(first.transfer))
    assert third.keys == keys(path)[16:]
    script.end(second.transfer)
    assert the_grant(script.end(third.transfer)).reused_blocks == (0, 20, 0)


def test_runs_that_end_out_of_order_are_published_in_order() -> None:
    script = tiered(hbm_slots=32, dram_slots=32)
    path = "abcdefghijklmnopqrst"
    script.put_to_sleep(path)
    first, second, third = copies(script.arrive(1, path, output_tokens=0))
    assert script.end(third.transfer) == []
    assert script.end(first.transfer) == []
    assert script.where(path) == ["HD"] * 8 + ["D"] * 12
    assert the_grant(script.end(second.transfer)).cached_tokens == 80


def test_a_turn_is_told_where_its_blocks_came_from_also_when_a_hint_has_brought_them() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.HBM, 30.0))
    script.end_all()
    grant = the_grant(script.arrive(1, "ab"))
    assert grant.reused_blocks == (0, 2, 0)
    script.stop(1)
    assert the_grant(script.arrive(2, "ab")).reused_blocks == (2, 0, 0)


def test_a_turn_whose_load_came_late_does_not_try_again_and_the_next_one_does() -> None:
    script = tiered(hbm_slots=4, max_running=1)
    script.put_to_sleep("ab")
    script.arrive(1, "ab", output_tokens=0)
    assert granted(script.wait(2.0)) == []
    script.end_all()
    assert script.copies == {}
    script.stop(1)
    assert len(copies(script.arrive(2, "ab", output_tokens=0))) == 1


def test_a_corrupt_block_that_is_still_pinned_is_not_read_again() -> None:
    script = tiered(hbm_slots=24)
    script.put_to_sleep("abcdefghij")
    first, second = copies(script.arrive(1, "abcdefghij", output_tokens=0))
    script.end(first.transfer, good=1, reason=TransferEnd.CORRUPT)
    assert script.where("ab") == ["HD", "D"], "the second run, given up, still reads blocks below it"
    assert the_grant(script.arrive(2, "ab", output_tokens=0)).cached_tokens == 4
    script.end(second.transfer)
    assert script.where("ab") == ["HD", ""]


def test_copies_down_yield_until_a_turn_waits_for_what_they_free() -> None:
    script = tiered(hbm_slots=4)
    script.run(1, "abc")
    actions = script.feed(SleepWanted(keys("abc")))
    (copy,) = copies(actions)
    assert hurried(actions) == []
    actions = script.arrive(2, "xyz", output_tokens=0)
    assert hurried(actions) == [copy.transfer]
    assert hurried(script.wait(0.1)) == [], "once is enough"
    assert granted(script.end_all()) == [2]


def test_a_copy_down_that_a_turn_starts_itself_never_yields() -> None:
    script = tiered(hbm_slots=4)
    script.run(1, "abc")
    actions = script.arrive(2, "xyz", output_tokens=0)
    assert hurried(actions) == [copy.transfer for copy in copies(actions)] != []
    script.end_all()


def test_a_turn_that_waits_for_its_place_alone_hurries_nothing() -> None:
    script = tiered(hbm_slots=8, max_running=1)
    script.run(1, "abc")
    script.arrive(2, "xy")
    script.arrive(3, "pq")
    actions = script.feed(SleepWanted(keys("abc")))
    assert copies(actions)
    assert hurried(actions) == hurried(script.wait(0.1)) == []
    script.end_all()


# --- hints ------------------------------------------------------------------------------


def test_a_hint_brings_a_chain_up_and_keeps_it_for_a_while() -> None:
    script = tiered(hbm_slots=5)
    script.put_to_sleep("ab")
    script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.HBM, 30.0))
    assert script.end_all() == [AnswerWake(WakeId(1), WakeStatus.AWAKE, 8, Tier.DRAM)]
    for turn, path in ((1, "x"), (2, "y")):
        script.now += 1.0
        script.run(turn, path)
    assert (script.where("ab"), script.where("x")) == (["HD", "HD"], ["D"]), "x was used later, but ab is kept"
    script.now = 40.0
    script.run(3, "z")
    assert (script.where("ab"), script.where("y")) == (["HD", "D"], ["H"])


def test_a_hint_for_what_is_awake_is_answered_at_once() -> None:
    script = tiered()
    script.run(1, "ab")
    actions = script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.HBM, 1.0))
    assert actions == [AnswerWake(WakeId(1), WakeStatus.AWAKE, 8, Tier.HBM)]


@pytest.mark.parametrize(("path", "status"), [("pq", WakeStatus.NOT_STORED), ("ab", WakeStatus.NO_ROOM)])
def test_a_hint_that_cannot_be_met_is_declined(path: str, status: WakeStatus) -> None:
    script = tiered(hbm_slots=4)
    script.put_to_sleep("ab")
    script.arrive(1, "xy", output_tokens=0)
    assert script.feed(WakeHinted(WakeId(1), keys(path), Tier.HBM, 1.0)) == [AnswerWake(WakeId(1), status, 0, Tier.HBM)]


def test_a_hint_gives_way_to_a_turn_that_needs_the_room() -> None:
    script = tiered(hbm_slots=4)
    script.put_to_sleep("abc")
    script.feed(WakeHinted(WakeId(1), keys("abc"), Tier.HBM, 30.0))
    assert script.arrive(1, "xy", output_tokens=3) == []
    actions = script.end_all()
    assert granted(actions) == [1]


def test_a_turn_that_waited_for_two_hints_is_granted_in_the_call_that_settles_them() -> None:
    script = tiered(hbm_slots=4)
    script.put_to_sleep("abc")
    for wake in (1, 2):
        script.feed(WakeHinted(WakeId(wake), keys("abc"), Tier.HBM, 30.0))
    assert script.arrive(1, "xy", output_tokens=3) == []
    assert granted(script.end_all()) == [1]


def test_a_hint_can_be_withdrawn() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    (load,) = copies(script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.HBM, 30.0)))
    assert script.feed(WakeCancelled(WakeId(1))) == [
        AnswerWake(WakeId(1), WakeStatus.CANCELLED, 0, Tier.DRAM),
        CancelTransfer(load.transfer),
    ]
    assert script.feed(WakeCancelled(WakeId(1))) == []
    script.end_all()
    assert script.planner.snapshot().hints == 0


def test_a_hint_to_dram_lifts_from_nvme_and_leaves_hbm_alone() -> None:
    script = tiered(dram_slots=4, nvme_slots=16, dram_high=0.5, dram_low=0.2)
    script.put_to_sleep_in_nvme("abc")
    (lift,) = copies(script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.DRAM, 30.0)))
    assert (lift.source, lift.target) == (Tier.NVME, Tier.DRAM)
    assert script.end(lift.transfer) == [AnswerWake(WakeId(1), WakeStatus.AWAKE, 8, Tier.NVME)]
    assert script.where("ab") == ["DN", "DN"]


# --- NVMe's place -----------------------------------------------------------------------


def test_a_wake_from_nvme_passes_through_dram_where_a_slot_is_free() -> None:
    script = tiered(dram_slots=4, nvme_slots=16, dram_high=0.5, dram_low=0.2)
    script.put_to_sleep_in_nvme("abc")
    (lift,) = copies(script.arrive(1, "ab", output_tokens=0))
    assert (lift.source, lift.target, lift.ring_slots) == (Tier.NVME, Tier.DRAM, ())
    (load,) = copies(script.end(lift.transfer))
    assert (load.source, load.target) == (Tier.DRAM, Tier.HBM)
    assert the_grant(script.end(load.transfer)).reused_blocks == (0, 0, 2)


def test_without_dram_blocks_pass_between_hbm_and_nvme_through_ring_slots() -> None:
    script = tiered(dram_slots=0, nvme_slots=16, ring_slots=2)
    script.run(1, "abc")
    script.record("abc")
    (down,) = copies(script.feed(SleepWanted(keys("abc"))))
    assert (down.source, down.target, len(down.keys), down.ring_slots) == (Tier.HBM, Tier.NVME, 2, (3, 2))
    script.end_all()
    assert script.where("abc") == ["N", "N", "N"]
    (up,) = copies(script.arrive(2, "abc", output_tokens=0))
    assert (up.source, up.target, up.ring_slots) == (Tier.NVME, Tier.HBM, (1, 0))
    assert the_grant(script.end_all()).reused_blocks == (0, 0, 3)


# --- tails ------------------------------------------------------------------------------


def test_a_turn_that_keeps_nothing_sleeps_whole_and_goes_on_where_it_was() -> None:
    script = tiered(hbm_slots=6)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "bcd", output_tokens=0, cache=False)
    assert suspended(script.grow(1)) == [2]
    (tail,) = copies(script.stop(2, StopReason.SUSPENDED, computed=10))
    assert tail.keys == (None, None, None)
    script.end(tail.transfer)
    script.stop(1)
    grant = the_grant(script.end_all())
    assert (grant.cached_tokens, grant.resumed) == (10, True)


def test_a_tail_for_which_dram_has_no_room_is_computed_again() -> None:
    script = tiered(hbm_slots=4, dram_slots=1)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "bc"[:1], output_tokens=3, cache=False)
    script.grow(1)
    script.stop(2, StopReason.SUSPENDED, computed=5)
    assert script.copies == {}
    assert the_grant(script.stop(1)).cached_tokens == 0


def test_a_tail_whose_copy_down_comes_late_is_computed_again_and_its_slot_waits_for_the_copy() -> None:
    script = tiered(hbm_slots=4)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "b", output_tokens=3)
    script.fill(2, 0)
    script.grow(1)
    (tail,) = copies(script.stop(2, StopReason.SUSPENDED, tokens=7, computed=6))
    script.wait(2.0)
    assert script.slots(Tier.DRAM)["quarantined"] == 1
    assert the_grant(script.stop(1)).turn == 2
    assert script.slots(Tier.HBM)["open"] == 3
    script.end(tail.transfer)
    assert script.slots(Tier.HBM)["open"] == 2


def test_a_lost_tail_keeps_the_slots_that_are_still_being_read() -> None:
    script = tiered(hbm_slots=16)
    script.arrive(1, "a", output_tokens=3)
    script.arrive(2, "bcdefghijk", output_tokens=0, cache=False)
    for _ in range(4):
        script.grow(1)
    script.stop(2, StopReason.SUSPENDED, computed=40)
    script.end_all()
    first, second = copies(script.stop(1))
    assert [len(first.keys), len(second.keys)] == [8, 2]
    script.end(first.transfer, good=3, reason=TransferEnd.FAILED)
    assert script.slots(Tier.DRAM) == {"free": 6, "open": 10}
    script.end(second.transfer)
    assert script.slots(Tier.DRAM) == {"free": 16}


# --- branches ---------------------------------------------------------------------------


def test_a_superseded_tail_goes_first_and_is_not_copied_down() -> None:
    script = tiered()
    script.run(1, "z")
    script.now = 1.0
    script.run(2, "abc")
    script.run(3, "abx")
    script.feed(BranchRecorded(keys("abx")[-1], keys("abc")[-1], keys("abc")[2:]))
    assert granted(script.arrive(4, "pqr", output_tokens=0)) == [4]
    assert (script.where("z"), script.where("abc"), script.where("abx")) == (["H"], ["H", "H", ""], ["H"] * 3)


def test_what_a_final_branch_shares_with_another_is_not_final() -> None:
    script = tiered()
    script.run(1, "abcd")
    script.run(2, "abx")
    script.feed(BranchRecorded(keys("abx")[-1]))
    script.now = 1.0
    script.feed(BranchRecorded(keys("abcd")[-1], final=True))
    script.arrive(3, "pqr", output_tokens=0)
    assert script.where("abcd") == ["H", "H", "", ""] or script.where("abcd") == ["H", "H", "H", ""]
    assert script.where("abx") == ["H", "H", "H"]


@pytest.mark.parametrize("wish", [{"keep_seconds": 100.0}, {"pinned": True}])
def test_a_branch_that_asked_to_stay_goes_last_and_never_starves_others(wish: dict[str, Any]) -> None:
    script = tiered(hbm_slots=6, dram_slots=0)
    script.run(1, "ab")
    script.feed(BranchRecorded(keys("ab")[-1], **wish))
    script.now = 1.0
    script.run(2, "xy")
    script.now = 2.0
    script.arrive(3, "pqr", output_tokens=0)
    script.stop(3)
    assert (script.where("ab"), script.where("xy")) == (["H", "H"], ["", ""])
    assert granted(script.arrive(4, "pqrst", output_tokens=0)) == [4]
    assert script.where("ab") == ["", ""]


def test_closing_a_session_frees_what_no_other_branch_shares_in_every_tier_superseded_tails_too() -> None:
    script = tiered(hbm_slots=16)
    script.put_to_sleep("abcd")
    script.run(1, "abx")
    script.run(2, "abcz")
    script.feed(BranchRecorded(keys("abx")[-1]))
    script.feed(BranchRecorded(keys("abcd")[-1]))
    script.feed(BranchRecorded(keys("abcz")[-1], keys("abcd")[-1], keys("abcd")[3:]))
    script.now = 1.0
    script.feed(SessionClosed((keys("abcz")[-1],)))
    assert script.where("abcz") == script.where("abcd") == ["HD", "HD", "", ""]
    assert script.where("abx") == ["HD", "HD", "H"]
    script.feed(SessionClosed((keys("abx")[-1],)))
    assert script.slots(Tier.HBM) == {"free": 16}
    assert script.slots(Tier.DRAM) == {"free": 16}


def test_a_branch_that_forked_keeps_the_blocks_of_the_session_that_is_closed() -> None:
    script = tiered()
    script.run(1, "ab")
    script.feed(BranchRecorded(keys("ab")[-1]))
    script.feed(BranchRecorded(keys("ab")[-1]))
    script.now = 1.0
    script.feed(SessionClosed((keys("ab")[-1],)))
    assert script.where("ab") == ["H", "H"]
    script.feed(SessionClosed((keys("ab")[-1],)))
    assert script.where("ab") == ["", ""]


# --- the whole --------------------------------------------------------------------------


def test_500_forks_of_a_long_session_cost_about_one_copy() -> None:
    script = Script(hbm_slots=600, dram_slots=0)
    history = "".join(chr(0x100 + block) for block in range(62))
    script.run(1, history)
    for fork in range(500):
        script.run(2 + fork, history + chr(0x1000 + fork))
    assert script.planner.snapshot().tier(Tier.HBM).valid == 62 + 500


def test_more_idle_sessions_than_any_pool_holds_never_block_a_new_one() -> None:
    script = Script(hbm_slots=16, dram_slots=32)
    for session in range(200):
        actions = script.arrive(session, "".join(chr(0x100 + 8 * session + block) for block in range(6)))
        actions += script.end_all()
        assert granted(actions) == [session]
        script.fill(session, *range(6))
        script.stop(session)
        script.now += 1.0


def test_a_long_prompt_among_a_steady_stream_of_short_ones_starts_within_the_age_limit() -> None:
    script = Script(hbm_slots=32, max_running=8, max_queue=100, age_limit_seconds=5.0, output_slice_tokens=4)
    for turn in range(8):
        script.arrive(turn, chr(0x100 + turn) * 2)
    script.arrive(500, "".join(chr(0x1000 + block) for block in range(28)), output_tokens=0)
    started, next_turn = None, 8
    while started is None and script.now < 20.0:
        script.now += 0.25
        actions = script.wait(0.0)
        running = sorted(script.running)
        for turn in running[:1]:
            actions += script.stop(turn)
            actions += script.arrive(next_turn, chr(0x100 + next_turn) * 2)
            next_turn += 1
        for turn in suspended(actions):
            actions += script.stop(turn, StopReason.SUSPENDED)
        started = script.now if 500 in script.running else None
    assert started is not None
    assert started <= 5.0 + 2.5, "at most ten short turns run to their end after it has become old"


@pytest.mark.parametrize("seed", range(3))
def test_sessions_for_which_dram_has_room_lose_no_block(seed: int) -> None:
    """24 sessions of three turns in random order, 16 in flight, HBM for a few of them and DRAM for all."""
    rng = random.Random(seed)
    config = PlannerConfig(
        hbm_slots=60,
        block_tokens=2,
        max_running=16,
        max_queue=64,
        age_limit_seconds=30.0,
        output_slice_tokens=4,
        dram_slots=1_000,
    )
    world = World(config)
    turns = sorted(session for session in range(24) for _ in range(3))
    rng.shuffle(turns)
    histories: dict[int, list[int]] = {session: [] for session in range(24)}
    stored = 0
    while turns or world.clients:
        while turns and len(world.clients) < 16:
            session = turns.pop()
            history = histories[session]
            stored += max(0, len(history) - 1) // 2
            history += [100 + session, *(rng.randrange(2) for _ in range(rng.randint(4, 8)))]
            world.arrive(history, 4, 0, cache=True, hint=None)
            world.step((3, 8))
        for transfer in list(world.copies):
            world.end_copy(transfer, 0, TransferEnd.DONE)
        world.step((3, 8))
        world.pass_time(0.01)
    world.finish()
    totals = world.planner.snapshot().totals
    assert totals.evicted == 0
    assert world.seen["recomputed"] == 0


@pytest.mark.parametrize("seed", range(40))
def test_a_random_life_breaks_no_law_and_comes_to_its_end(seed: int) -> None:
    rng = random.Random(seed)
    world = World(
        PlannerConfig(
            hbm_slots=rng.randint(4, 20),
            block_tokens=2,
            max_running=rng.randint(1, 6),
            max_queue=rng.randint(0, 8),
            age_limit_seconds=5.0,
            output_slice_tokens=rng.choice([1, 3, 6]),
            dram_slots=rng.choice([0, rng.randint(1, 8), rng.randint(8, 60)]),
            nvme_slots=rng.choice([0, rng.randint(1, 12), rng.randint(12, 80)]),
            ring_slots=rng.randint(1, 4),
            max_transfers=rng.randint(1, 4),
            slot_bytes=1,
            nvme_write_policy=rng.choice(list(WritePolicy)),
            nvme_rated_bytes_per_day=rng.choice([0, 20]),
            idle_to_nvme_seconds=3.0,
            late_reads_until_off=rng.randint(1, 3),
            prefill_tokens_per_second=rng.choice([0.0, 20.0]),
            nvme_blocks_per_second=5.0,
        )
    )
    for _ in range(250):
        _live(world, rng)
    world.finish()


def _live(world: World, rng: random.Random) -> None:
    chance = rng.random()
    history = rng.choice(world.histories[-12:]) if world.histories else ()
    if chance < 0.2:
        start = history[: rng.randint(0, len(history))] if rng.random() < 0.6 else ()
        world.arrive(
            [*start, *rng.choices((0, 1), k=rng.randint(1, 8))],
            rng.randint(0, 12),
            rng.choice([0, 0, -1, 1]),
            cache=rng.random() < 0.9,
            hint=rng.choice([None, *world.hints]),
            to_nvme=rng.random() < 0.5,
        )
    elif chance < 0.5:
        world.step(rng.choices((1, 2, 5, 30), k=4))
        if chance < 0.45:
            world.record_ended(to_nvme=chance < 0.4)
    elif chance < 0.75 and world.copies:
        reason = rng.choice(list(TransferEnd)) if rng.random() < 0.2 else TransferEnd.DONE
        world.end_copy(rng.choice(list(world.copies)), rng.randint(0, 8), reason)
    elif chance < 0.82:
        world.pass_time(rng.choice([0.0, 0.1, 0.5, 2.0, 6.0, -1.0]))
    elif chance < 0.85 and world.clients:
        world.cancel(rng.choice(list(world.clients)))
    elif chance < 0.9:
        world.hint(history, rng.choice([Tier.HBM, Tier.HBM, Tier.DRAM]), 3.0)
    elif chance < 0.93:
        branch = rng.choice([None, *world.branches])
        world.record(branch, history, rng.random() < 0.7, keep_seconds=rng.choice([0.0, 4.0]), final=rng.random() < 0.2)
    elif chance < 0.95 and world.branches:
        world.close(rng.choice(world.branches))
    elif chance < 0.97:
        world.sleep(history, rng.choice([Tier.DRAM, Tier.NVME]))
    elif chance < 0.98:
        world.flush()
    elif chance < 0.985 and world.erasing:
        world.erase()
    elif chance < 0.99:
        world.drain(5.0)
    elif chance < 0.993:
        world.crash()


def test_a_flush_leaves_what_is_on_its_way() -> None:
    script = tiered()
    script.put_to_sleep("ab")
    script.run(1, "x")
    (load,) = copies(script.arrive(2, "ab", output_tokens=0))
    script.feed(FlushWanted())
    assert script.where("x") == [""]
    grant = the_grant(script.end(load.transfer))
    assert isinstance(grant, GrantTurn)
    assert grant.cached_tokens == 8


def test_a_drain_without_nvme_is_not_due_for_ever() -> None:
    script = Script(hbm_slots=8, dram_slots=8)
    script.feed(FlushDown(1.0))
    script.wait(2.0)
    assert script.planner.next_timeout() is None
