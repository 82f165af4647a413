"""What goes to NVMe and when, what stays of it, and what must not: by scripts."""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.config import PlannerConfig
from kvstore.events import (
    AnswerWake,
    BlocksFound,
    BranchRecorded,
    FlushDown,
    FlushWanted,
    ForgetBlocks,
    Miss,
    ProbeTier,
    RecordBlocks,
    RecordedBlock,
    SessionClosed,
    SleepWanted,
    TierHealth,
    TierHealthChanged,
    TransferEnd,
    WakeHinted,
    WakeStatus,
    WritePolicy,
    WritePolicyChanged,
)
from kvstore.planner import Planner
from kvstore.types import BlockKey, Tier, WakeId
from tests.kvstore.script import Script, copies, granted, keys, the_grant

if TYPE_CHECKING:
    from kvstore.events import FoundBlock

EVERY_TURN: dict[str, Any] = {"nvme_write_policy": WritePolicy.EVERY_TURN}
ON_IDLE: dict[str, Any] = {"nvme_write_policy": WritePolicy.ON_IDLE, "idle_to_nvme_seconds": 30.0}


def tiered(hbm_slots: int = 8, dram_slots: int = 16, nvme_slots: int = 32, **more: Any) -> Script:
    """Nothing is copied from HBM to DRAM ahead of need, and to NVMe only on pressure, unless asked for."""
    still = {"clean_share": 0.0, "hbm_high": 1.0, "dram_high": 1.0}
    return Script(hbm_slots=hbm_slots, dram_slots=dram_slots, nvme_slots=nvme_slots, **(still | more))


# --- when blocks are written ------------------------------------------------------------


def test_every_turn_what_it_has_added_is_written_when_its_branch_is_recorded_and_nothing_else() -> None:
    script = tiered(**EVERY_TURN)
    script.run(1, "ab")
    assert script.copies == {}
    (first,) = copies(script.record("ab"))
    assert (first.source, first.target, first.keys) == (Tier.HBM, Tier.NVME, keys("ab"))
    (told,) = script.end(first.transfer)
    assert told == RecordBlocks(
        (
            RecordedBlock(keys("ab")[0], None, 0, first.target_slots[0]),
            RecordedBlock(keys("ab")[1], keys("ab")[0], 1, first.target_slots[1]),
        )
    )
    script.run(2, "abcd")
    (second,) = copies(script.record("abcd", old="ab"))
    assert second.keys == keys("abcd")[2:]
    script.end_all()
    assert script.where("abcd") == ["HN"] * 4
    assert copies(script.record("abcd", old="abcd")) == []
    assert script.planner.snapshot().totals.nvme_blocks_written == 4


def test_what_dram_has_is_written_from_there() -> None:
    script = tiered(**EVERY_TURN)
    script.put_to_sleep("ab")
    (down,) = copies(script.record("ab"))
    assert (down.source, down.ring_slots) == (Tier.DRAM, ())


def test_a_long_branch_is_written_parents_first_two_runs_at_a_time() -> None:
    script = tiered(hbm_slots=40, ring_slots=16, **EVERY_TURN)
    path = "abcdefghijklmnopqrstuvwxyz"
    script.run(1, path)
    first, second = copies(script.record(path))
    assert (first.keys, second.keys) == (keys(path)[:8], keys(path)[8:16])
    (third,) = copies(script.end(first.transfer))
    assert third.keys == keys(path)[16:24]
    script.end_all()
    assert script.where(path) == ["HN"] * 26


def test_on_idle_a_branch_is_written_when_nobody_has_used_it_for_a_while() -> None:
    script = tiered(**ON_IDLE)
    script.run(1, "ab")
    script.record("ab")
    script.now = 20.0
    script.run(2, "abc")
    script.record("abc", old="ab")
    assert script.planner.next_timeout() == 50.0
    assert script.wait(29.0) == []
    (down,) = copies(script.wait(1.0))
    assert down.keys == keys("abc")
    script.end_all()
    assert script.where("abc") == ["HN"] * 3


def test_on_idle_a_branch_at_which_a_turn_runs_is_not_idle() -> None:
    script = tiered(**ON_IDLE)
    script.run(1, "ab")
    script.record("ab")
    script.now = 29.0
    script.arrive(2, "ab")
    assert script.wait(1.0) == []
    script.stop(2)
    assert copies(script.wait(29.0)) == []
    assert len(copies(script.wait(1.0))) == 1


def test_on_pressure_nothing_is_written_until_dram_needs_the_room() -> None:
    script = tiered(dram_slots=4, dram_high=0.7, dram_low=0.3)
    script.run(1, "ab")
    script.record("ab")
    script.wait(1_000.0)
    assert script.copies == {}
    script.feed(SleepWanted(keys("ab")))
    script.end_all()
    assert script.where("ab") == ["D", "D"]
    script.now += 1.0
    script.run(2, "x")
    script.record("x")
    _, down = copies(script.feed(SleepWanted(keys("x"))))
    assert (down.source, down.target, down.keys) == (Tier.DRAM, Tier.NVME, keys("ab"))
    script.end_all()
    assert (script.where("ab"), script.where("x")) == (["N", "N"], ["D"])


def test_auto_writes_every_turn_until_the_days_bytes_are_the_drives_rating_and_says_so_once() -> None:
    auto: dict[str, Any] = {"nvme_write_policy": WritePolicy.AUTO, "nvme_rated_bytes_per_day": 300, "slot_bytes": 100}
    script = tiered(**auto)
    script.run(1, "abc")
    (down,) = copies(script.record("abc"))
    actions = script.end(down.transfer)
    assert WritePolicyChanged(WritePolicy.ON_PRESSURE, 300) in actions
    script.run(2, "xy")
    assert script.record("xy") == []
    snapshot = script.planner.snapshot()
    assert (snapshot.nvme_write_policy, snapshot.dirty_blocks) == (WritePolicy.ON_PRESSURE, 2)
    assert snapshot.totals.nvme_bytes_written == 300
    assert script.wait(24 * 3600.0) == [WritePolicyChanged(WritePolicy.EVERY_TURN, 0)]
    assert len(copies(script.record("xy", old="xy"))) == 1


def test_a_branch_shorter_than_the_least_is_not_kept_on_nvme() -> None:
    script = tiered(nvme_min_tokens=9, **EVERY_TURN)
    script.run(1, "ab")
    assert script.record("ab") == []
    assert script.planner.snapshot().dirty_blocks == 0
    script.run(2, "abc")
    (down,) = copies(script.record("abc", old="ab"))
    assert down.keys == keys("abc")


def test_a_copy_that_failed_is_made_again_when_the_tier_is_trusted_again() -> None:
    script = tiered(tier_backoff_seconds=5.0, **EVERY_TURN)
    script.run(1, "ab")
    (down,) = copies(script.record("ab"))
    assert script.end(down.transfer, good=0, reason=TransferEnd.FAILED) == []
    assert script.planner.snapshot().tier(Tier.NVME).health is TierHealth.SUSPECT
    assert script.planner.next_timeout() == 5.0
    assert len(copies(script.wait(5.0))) == 1
    script.end_all()
    assert script.where("ab") == ["HN", "HN"]
    assert script.planner.snapshot().tier(Tier.NVME).health is TierHealth.OK


def test_a_disk_that_hangs_pins_two_runs_of_hbm_and_no_more() -> None:
    script = tiered(hbm_slots=40, ring_slots=40, **EVERY_TURN)
    path = "abcdefghijklmnopqrstuvwxyz"
    script.run(1, path)
    assert len(copies(script.record(path))) == 2
    for _ in range(10):
        script.wait(6.0)
    assert len(script.copies) == 2


# --- a drain ----------------------------------------------------------------------------


def test_a_drain_copies_down_whatever_is_allowed_there_and_counts_down() -> None:
    script = tiered(hbm_slots=40, max_transfers=4)
    script.put_to_sleep("abcdefghij")
    script.record("abcdefghij")
    script.run(1, "xyz")
    script.record("xyz")
    script.run(2, "pq")
    script.record("pq", to_nvme=False)
    assert script.planner.snapshot().dirty_blocks == 13
    script.feed(FlushDown(10.0))
    left = [script.planner.snapshot().sinking_blocks]
    while script.copies:
        script.end(next(iter(script.copies)))
        left.append(script.planner.snapshot().sinking_blocks)
    assert left[0] == 13
    assert left == sorted(left, reverse=True)
    assert (left[-1], script.planner.snapshot().dirty_blocks) == (0, 0)
    assert (script.where("xyz"), script.where("pq")) == (["HN"] * 3, ["H"] * 2)


def test_a_drain_takes_what_is_recorded_while_it_lasts_and_nothing_after_its_deadline() -> None:
    script = tiered()
    script.feed(FlushDown(10.0))
    script.run(1, "ab")
    assert len(copies(script.record("ab"))) == 1
    script.end_all()
    script.now = 10.0
    script.run(2, "xy")
    assert script.record("xy") == []
    assert script.planner.snapshot().sinking_blocks == 0


def test_a_drain_does_not_wait_for_what_has_no_room() -> None:
    script = tiered(nvme_slots=2)
    script.now = 1.0
    script.put_to_sleep_in_nvme("ab")
    script.now = 0.0
    script.run(2, "xyz")
    script.record("xyz")
    script.planner.snapshot()
    script.feed(BranchRecorded(keys("ab")[-1], keys("ab")[-1], pinned=True))
    script.feed(FlushDown(10.0))
    assert script.planner.snapshot().sinking_blocks == 0
    assert script.planner.snapshot().dirty_blocks == 3


# --- sleeping and waking through it -----------------------------------------------------


def test_a_wish_to_sleep_on_nvme_frees_hbm_and_dram_once_all_of_it_is_there() -> None:
    script = tiered(hbm_slots=16, ring_slots=4)
    path = "abcdefghij"
    script.run(1, path)
    script.record(path)
    script.feed(SleepWanted(keys(path)[:4]))
    script.end_all()
    script.feed(SleepWanted(keys(path), Tier.NVME))
    script.end_all()
    assert script.where(path) == ["N"] * 10


def test_what_may_not_lie_on_nvme_sleeps_in_dram_instead() -> None:
    script = tiered()
    script.run(1, "ab")
    script.record("ab", to_nvme=False)
    script.feed(SleepWanted(keys("ab"), Tier.NVME))
    script.end_all()
    assert script.where("ab") == ["D", "D"]


def test_a_session_longer_than_dram_sleeps_and_wakes_whole() -> None:
    script = tiered(hbm_slots=30, dram_slots=3, ring_slots=2, dram_high=0.85, dram_low=0.75)
    path = "abcdefghijklmnopqrstuvwxyz"
    script.run(1, path)
    script.record(path)
    script.now = 1.0
    script.arrive(2, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", output_tokens=0)
    script.end_all()
    assert 2 in script.running
    script.stop(2)
    assert "" not in script.where(path), "every block of it is somewhere"
    script.now = 2.0
    actions = script.arrive(3, path, output_tokens=0) + script.end_all()
    assert the_grant(actions).cached_tokens == 4 * 26
    assert the_grant(actions).reused_blocks[Tier.NVME] >= 15


@pytest.mark.parametrize("ring_slots", [1, 3, 8])
def test_without_dram_a_session_goes_straight_to_nvme_and_back(ring_slots: int) -> None:
    script = tiered(hbm_slots=14, dram_slots=0, ring_slots=ring_slots)
    path = "abcdefghijkl"
    script.run(1, path)
    script.record(path)
    script.now = 1.0
    script.run(2, "ABCDEFGHIJKL")
    assert script.where(path) == ["N"] * 12
    script.record("ABCDEFGHIJKL")
    script.now = 2.0
    grant = the_grant(script.arrive(3, path) + script.end_all())
    assert grant.cached_tokens == 48
    assert grant.reused_blocks[Tier.NVME] == 12


def test_a_block_that_nvme_has_goes_to_dram_as_well_when_hbm_needs_the_room() -> None:
    script = tiered(**EVERY_TURN)
    script.run(1, "abc")
    script.record("abc")
    script.end_all()
    script.now = 1.0
    script.run(2, "vwxyz")
    script.end_all()
    assert script.where("abc")[1:] == ["DN", "DN"]


def test_with_dram_full_a_block_that_nvme_has_leaves_hbm_at_once() -> None:
    script = tiered(dram_slots=2, **EVERY_TURN)
    script.put_to_sleep("pq")
    script.feed(BranchRecorded(keys("pq")[-1], pinned=True, to_nvme=False))
    script.run(1, "abc")
    script.record("abc")
    script.end_all()
    script.now = 1.0
    assert granted(script.arrive(2, "vwxyz", output_tokens=0)) == [2]
    assert script.where("abc") == ["HN", "HN", "N"]


# --- what is allowed there, and what has to go ------------------------------------------


def test_a_block_that_no_branch_allows_there_never_goes_to_nvme_whatever_the_pressure() -> None:
    script = tiered(hbm_slots=4, dram_slots=2, dram_high=0.5, dram_low=0.3)
    script.run(1, "abc")
    script.record("abc", to_nvme=False)
    script.now = 1.0
    script.run(2, "xyz")  # its branch is not recorded at all
    script.now = 2.0
    script.run(3, "pqr")
    assert script.slots(Tier.NVME) == {"free": 32}


def test_what_two_branches_share_goes_there_if_one_allows_it() -> None:
    script = tiered(**EVERY_TURN)
    script.run(1, "abc")
    script.record("abc", to_nvme=False)
    script.run(2, "abx")
    (down,) = copies(script.record("abx"))
    assert down.keys == keys("abx")
    script.end_all()
    script.now = 1.0
    script.feed(SessionClosed((keys("abx")[-1],)))
    assert script.where("abc") == ["H", "H", "H"], "for the other branch alone it must not stay there"
    assert script.slots(Tier.NVME) == {"free": 29, "erasing": 3}


def test_a_branch_that_is_told_to_stay_in_memory_is_erased_from_nvme_and_stays_above() -> None:
    script = tiered(**EVERY_TURN)
    script.run(1, "ab")
    script.record("ab")
    script.end_all()
    (told,) = script.record("ab", old="ab", to_nvme=False)
    assert isinstance(told, ForgetBlocks)
    assert told.erase
    assert script.where("ab") == ["H", "H"]


def test_a_closed_session_is_erased_and_its_slots_wait_for_it() -> None:
    script = tiered(nvme_slots=3)
    script.put_to_sleep_in_nvme("abc")
    script.now = 1.0
    (told,) = script.feed(SessionClosed((keys("abc")[-1],)))
    assert isinstance(told, ForgetBlocks)
    assert (sorted(told.slots), told.erase) == ([0, 1, 2], True)
    assert script.slots(Tier.NVME) == {"erasing": 3}
    script.erase_all()
    assert script.slots(Tier.NVME) == {"free": 3}
    assert script.planner.snapshot().totals.erased == 3


def test_what_was_evicted_from_nvme_before_its_session_is_closed_is_erased_too() -> None:
    script = tiered(nvme_slots=4)
    script.put_to_sleep_in_nvme("abc")
    script.now = 1.0
    script.put_to_sleep_in_nvme("xy")
    assert script.where("abc") == ["N", "N", ""], "the slot of its last block was used again"
    script.feed(SessionClosed((keys("xy")[-1],), (keys("xy"),)))
    script.erase_all()
    script.now = 2.0
    script.feed(FlushWanted())
    assert script.slots(Tier.NVME) == {"free": 4}
    script.feed(SessionClosed((keys("abc")[-1],), (keys("abc"),)))
    assert script.slots(Tier.NVME) == {"free": 2, "erasing": 2}


def test_bytes_left_in_a_free_slot_by_an_eviction_go_with_their_session() -> None:
    script = tiered()
    script.put_to_sleep_in_nvme("ab")
    (load,) = copies(script.arrive(1, "ab", output_tokens=0))
    script.end(load.transfer, good=1, reason=TransferEnd.CORRUPT)
    script.end_all()
    script.stop(1)
    assert script.slots(Tier.NVME) == {"free": 31, "valid": 1}
    script.now = 1.0
    script.feed(SessionClosed((keys("ab")[-1],), (keys("ab"),)))
    assert script.slots(Tier.NVME) == {"free": 30, "erasing": 2}


def test_a_superseded_tail_leaves_nvme_and_a_sibling_keeps_what_it_shares() -> None:
    script = tiered(hbm_slots=16, **EVERY_TURN)
    script.run(1, "abcd")
    script.record("abcd")
    script.run(2, "abcx")
    script.record("abcx")
    script.end_all()
    script.run(3, "aby")
    script.record("aby", old="abcd")
    script.end_all()
    assert script.where("abcd") == ["HN", "HN", "HN", "H"]
    assert script.where("abcx") == ["HN"] * 4
    assert script.slots(Tier.NVME)["erasing"] == 1


def test_a_final_branch_is_not_written() -> None:
    script = tiered(**EVERY_TURN)
    script.run(1, "ab")
    assert script.record("ab", final=True) == []
    assert script.planner.snapshot().dirty_blocks == 0


def test_a_branch_whose_tip_is_gone_is_still_known_by_what_is_left_of_it() -> None:
    script = tiered(dram_slots=0, nvme_slots=2)
    script.run(1, "abc")
    script.record("abc")
    script.feed(SleepWanted(keys("abc"), Tier.NVME))
    script.end_all()
    script.now = 1.0
    script.run(2, "stuvwxyz"[:7])
    assert script.where("abc") == ["N", "N", ""]
    script.now = 2.0
    script.feed(SessionClosed((keys("abc")[-1],)))
    assert script.slots(Tier.NVME) == {"erasing": 2}


@pytest.mark.parametrize("path", ["abc", "axy"], ids=["went on", "replaced its tail"])
def test_a_turn_whose_own_blocks_went_before_it_was_recorded_does_not_take_the_whole_session_with_them(
    path: str,
) -> None:
    script = tiered(dram_slots=0)
    script.put_to_sleep_in_nvme("ab")
    script.run(1, path)
    script.run(2, "stuvwxyz"[:7])
    kept = {"abc": ["N", "N", ""], "axy": ["N", "", ""]}[path]
    assert script.where(path) == kept
    script.record(path, old="ab")
    script.erase_all()
    assert script.where(path) == kept
    script.feed(SessionClosed((keys(path)[-1],)))
    script.erase_all()
    assert script.slots(Tier.NVME) == {"free": 32}


# --- health -----------------------------------------------------------------------------


def hang(script: Script, turn: int, path: str) -> list[Any]:
    """A turn whose load is not answered in time."""
    (load,) = copies(script.arrive(turn, path, output_tokens=0))
    actions = script.wait(2.0)
    script.end(load.transfer, good=0, reason=TransferEnd.CANCELLED)
    script.stop(turn)
    return actions


def test_after_three_deadlines_in_a_row_a_tier_is_not_read_until_a_probe_succeeds() -> None:
    script = tiered(probe_seconds=1.0)
    script.put_to_sleep_in_nvme("ab")
    for turn in (1, 2, 3):
        hang(script, turn, "ab")
    assert script.planner.snapshot().tier(Tier.NVME).health is TierHealth.OFF
    grant = the_grant(script.arrive(4, "ab", output_tokens=0))
    assert (grant.cached_tokens, grant.miss) == (0, Miss.LOAD_FAILED)
    script.stop(4)
    assert script.wait(1.0) == [ProbeTier(Tier.NVME)]
    assert script.wait(100.0) == [], "what does not answer is not asked again"
    script.feed(TierHealthChanged(Tier.NVME, TierHealth.OFF))
    assert script.wait(1.0) == [ProbeTier(Tier.NVME)]
    script.feed(TierHealthChanged(Tier.NVME, TierHealth.OK))
    assert the_grant(script.arrive(5, "ab") + script.end_all()).cached_tokens == 8


def test_a_read_in_time_between_them_is_not_in_a_row() -> None:
    script = tiered()
    script.put_to_sleep_in_nvme("ab")
    for turn in (1, 2):
        hang(script, turn, "ab")
    script.arrive(3, "ab", output_tokens=0)
    script.end_all()
    script.stop(3)
    script.feed(SleepWanted(keys("ab"), Tier.NVME))
    script.end_all()
    hang(script, 4, "ab")
    assert script.planner.snapshot().tier(Tier.NVME).health is TierHealth.OK


def test_many_reads_that_are_late_at_once_are_one_deadline() -> None:
    script = tiered(hbm_slots=40, dram_slots=0, nvme_slots=64, ring_slots=40)
    path = "abcdefghijklmnopqrstuvwxyz"
    script.put_to_sleep_in_nvme(path)
    assert len(copies(script.arrive(1, path, output_tokens=0))) == 4
    script.wait(2.0)
    assert script.slots(Tier.HBM)["quarantined"] == 26
    assert script.planner.snapshot().tier(Tier.NVME).health is TierHealth.OK


def test_a_turn_that_waits_when_its_tier_is_switched_off_computes_instead() -> None:
    script = tiered(hbm_slots=40, dram_slots=0, nvme_slots=64, ring_slots=8)
    path = "abcdefghijklmnopqrstuvwxyz"
    script.put_to_sleep_in_nvme(path)
    (load,) = copies(script.arrive(1, path, output_tokens=0))
    script.feed(TierHealthChanged(Tier.NVME, TierHealth.OFF))
    grant = the_grant(script.end(load.transfer))
    assert (grant.cached_tokens, grant.miss) == (32, Miss.LOAD_FAILED)


def test_a_suspect_tier_is_read_and_not_written() -> None:
    script = tiered(**EVERY_TURN)
    script.put_to_sleep_in_nvme("ab")
    script.feed(TierHealthChanged(Tier.NVME, TierHealth.SUSPECT))
    script.run(1, "xy")
    assert script.record("xy") == []
    assert the_grant(script.arrive(2, "ab") + script.end_all()).reused_blocks == (0, 0, 2)
    assert len(copies(script.feed(TierHealthChanged(Tier.NVME, TierHealth.OK)))) == 1


# --- after a restart --------------------------------------------------------------------


def found(path: str, *slots: int, last: float = 0.0) -> list[FoundBlock]:
    chain = keys(path)
    return [(chain[index], chain[index - 1] if index else None, index, slot, last) for index, slot in enumerate(slots)]


def adopt(script: Script, blocks: list[FoundBlock]) -> list[Any]:
    """The catalogue knows `blocks`, and the planner is told."""
    script.catalogue.update((slot, key) for key, _, _, slot, _ in blocks)
    return script.feed(BlocksFound(blocks))


def test_what_an_earlier_process_left_is_read_as_if_it_had_been_written_here() -> None:
    script = tiered()
    assert adopt(script, found("abc", 7, 3, 9)[::-1]) == []
    assert script.slots(Tier.NVME) == {"free": 29, "valid": 3}
    (lift,) = copies(script.arrive(1, "abc", output_tokens=0))
    assert (lift.source, lift.source_slots) == (Tier.NVME, (7, 3, 9))
    assert the_grant(script.end_all()).reused_blocks == (0, 0, 3)
    script.stop(1)
    assert copies(script.record("abcd"[:3], old="abc")) == []
    assert script.planner.snapshot().totals.found == 3


def test_blocks_that_no_turn_could_reach_or_that_come_twice_are_forgotten() -> None:
    script = tiered(nvme_slots=8)
    orphan = (keys("xy")[1], keys("xy")[0], 1, 4, 0.0)
    again = (keys("ab")[1], keys("ab")[0], 1, 5, 0.0)
    misplaced = (keys("q")[0], None, 3, 6, 0.0)
    beyond = (keys("z")[0], None, 0, 99, 0.0)
    (told,) = adopt(script, [orphan, *found("ab", 1, 2), again, misplaced, beyond])
    assert isinstance(told, ForgetBlocks)
    assert (sorted(told.slots), told.erase) == ([4, 5, 6, 99], False)
    assert (script.where("ab"), script.where("xy"), script.where("q")) == (["N", "N"], ["", ""], [""])


def test_of_what_was_found_the_coldest_leaves_first() -> None:
    script = tiered(nvme_slots=4)
    script.now = 100.0
    adopt(script, found("ab", 0, 1, last=50.0) + found("xy", 2, 3, last=-20.0))
    script.run(1, "p")
    script.record("p")
    script.feed(SleepWanted(keys("p"), Tier.NVME))
    script.end_all()
    assert (script.where("ab"), script.where("xy"), script.where("p")) == (["N", "N"], ["N", ""], ["N"])


def test_a_found_session_that_is_closed_leaves_nothing_and_takes_nothing_others_share() -> None:
    script = tiered()
    adopt(script, found("abc", 0, 1, 2) + found("abx", 0, 1, 3)[2:])
    script.now = 1.0
    # Its tip was never written: only its chain tells what is its.
    script.feed(SessionClosed((keys("abcde")[-1],), (keys("abcde"),)))
    assert (script.where("abc"), script.where("abx")) == (["N", "N", ""], ["N", "N", "N"])
    assert script.slots(Tier.NVME)["erasing"] == 1


def test_a_found_branch_goes_on_and_is_closed_whole() -> None:
    script = tiered(**EVERY_TURN)
    adopt(script, found("ab", 0, 1))
    script.arrive(1, "abc")
    script.end_all()
    script.fill(1, 2)
    script.stop(1)
    script.record("abc", old="ab")
    script.end_all()
    assert script.where("abc") == ["HDN", "HDN", "HN"]
    script.now = 1.0
    script.feed(SessionClosed((keys("abc")[-1],), (keys("abc"),)))
    assert script.slots(Tier.NVME) == {"free": 29, "erasing": 3}
    assert script.slots(Tier.HBM) == {"free": 8}


def test_a_hint_wakes_what_was_found() -> None:
    script = tiered()
    adopt(script, found("ab", 0, 1))
    script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.HBM, 30.0))
    assert AnswerWake(WakeId(1), WakeStatus.AWAKE, 8, Tier.NVME) in script.end_all()


def test_a_hundred_thousand_blocks_are_taken_over_in_a_moment() -> None:
    blocks: list[FoundBlock] = []
    for session in range(10_000):
        parent: BlockKey | None = None
        for index in range(10):
            name = BlockKey(blake2b(f"{session} {index}".encode(), digest_size=16).digest())
            blocks.append((name, parent, index, session * 10 + index, 0.0))
            parent = name
    config = PlannerConfig(
        hbm_slots=8, block_tokens=4, max_running=8, max_queue=8, age_limit_seconds=10.0, nvme_slots=120_000
    )
    planner = Planner(config)
    start = time.perf_counter()
    assert planner.handle(BlocksFound(blocks), 0.0) == []
    assert time.perf_counter() - start < 5.0, "half a second where nothing else runs"
    assert planner.snapshot().tier(Tier.NVME).valid == 100_000
    planner.check()


def test_a_chain_sent_to_sleep_on_a_tier_that_takes_nothing_goes_as_far_as_it_can_and_nobody_waits() -> None:
    script = tiered()
    script.run(1, "ab")
    script.feed(TierHealthChanged(Tier.NVME, TierHealth.SUSPECT))
    script.feed(SleepWanted(keys("ab"), Tier.NVME))
    script.end_all()
    assert not script.planner.are_falling_asleep(keys("ab"))
    assert script.where("ab") == ["D", "D"]
