"""Several tenants in one store: whose blocks make room for whom, and whose turns run."""

from __future__ import annotations

from typing import Any

from kvstore.events import AnswerWake, BlocksFound, GrantSlots, SessionClosed, SleepWanted, WakeHinted, WakeStatus
from kvstore.types import BlockKey, StopReason, Tier, WakeId
from tests.kvstore.script import Script, copies, granted, keys, suspended


def script(**sizes: Any) -> Script:
    return Script(**({"hbm_slots": 16, "output_slice_tokens": 1} | sizes))


def flood(it: Script, tenant: str, turns: int, blocks: int = 3, first: int = 100) -> None:
    """So many turns of `tenant`, one after the other, of that many blocks which nobody has seen."""
    for number in range(first, first + turns):
        it.now += 1.0
        it.run(number, chr(number) * blocks, tenant)


# --- eviction -----------------------------------------------------------------------------


def test_a_flood_displaces_itself_once_it_uses_more_than_its_share() -> None:
    it = script()
    it.run(1, "abcdefgh", "bob")  # his share: half of 16
    flood(it, "alice", 20)
    assert it.where("abcdefgh") == ["H"] * 8
    assert it.slots(Tier.HBM)["valid"] == 16 - it.slots(Tier.HBM).get("free", 0)


def test_under_one_name_the_least_recent_go_whosever_session_they_are() -> None:
    it = script()
    it.run(1, "abcdefgh", "alice")
    flood(it, "alice", 20)
    assert it.where("abcdefgh") == [""] * 8


def test_what_is_beyond_a_share_makes_room_for_others_whose_it_is_less() -> None:
    it = script()
    flood(it, "alice", 5)
    it.run(1, "abcdefg", "bob")
    assert it.where("abcdefg") == ["H"] * 7
    assert it.slots(Tier.HBM)["valid"] == 15
    # Of alice's the coldest went.
    assert [len(list(filter(None, it.where(chr(number) * 3)))) for number in range(100, 105)] == [0, 0, 2, 3, 3]


def test_three_share_alike_and_who_uses_most_gives_first() -> None:
    it = script(hbm_slots=21)
    flood(it, "alice", 4)
    flood(it, "carol", 2, first=200)
    flood(it, "bob", 2, first=300)
    had = {name: sum(bool(it.where(chr(number) * 3)[-1]) for number in range(first, first + turns))
           for name, first, turns in (("alice", 100, 4), ("carol", 200, 2), ("bob", 300, 2))}  # fmt: skip
    assert had == {"alice": 2, "carol": 2, "bob": 2}


def test_a_tenant_that_has_nothing_left_takes_no_share() -> None:
    it = script()
    it.run(1, "ab", "bob")
    it.record("ab")
    flood(it, "alice", 10)
    assert it.where("ab") == ["H", "H"]
    it.feed(SessionClosed((keys("ab")[-1],), (keys("ab"),)))
    flood(it, "alice", 10, first=200)
    assert it.slots(Tier.HBM)["valid"] >= 14


def test_asking_to_stay_keeps_blocks_before_ones_own_and_not_before_others() -> None:
    it = script()
    it.run(1, "abcdef", "bob")
    for number in range(100, 106):
        it.now += 1.0
        it.run(number, chr(number) * 3, "alice")
        it.record(chr(number) * 3, keep_seconds=1_000.0, pinned=True)
    flood(it, "alice", 4, first=200)
    assert it.where("abcdef") == ["H"] * 6
    assert it.where("iii") == ["H"] * 3  # the last that was pinned


def test_what_leaves_at_no_loss_goes_first_whosever_it_is() -> None:
    it = script()
    it.run(1, "abcdef", "bob")
    it.record("abcdef", final=True)
    flood(it, "alice", 5)
    assert it.where("abcdef")[-1] == ""
    assert it.where("ddd") == ["H"] * 3


# --- lower tiers --------------------------------------------------------------------------


def test_in_dram_a_flood_does_not_push_anyone_below_their_share() -> None:
    it = script(dram_slots=16, clean_share=0.0)
    it.run(1, "abcdefgh", "bob")
    it.feed(SleepWanted(keys("abcdefgh")))
    it.end_all()
    assert it.where("abcdefgh") == ["D"] * 8
    flood(it, "alice", 30)
    it.end_all()
    assert it.where("abcdefgh") == ["D"] * 8
    # Now bob comes back for more, and finds room below for all that is his share.
    it.run(2, "ABCDEF", "bob")
    it.feed(SleepWanted(keys("ABCDEF")))
    it.end_all()
    assert sum(where != "" for where in (*it.where("abcdefgh"), *it.where("ABCDEF"))) >= 8


def test_whoever_uses_less_than_its_share_of_dram_gets_room_there_for_its_coldest_block() -> None:
    it = script(dram_slots=8, clean_share=0.0)
    it.run(1, "ab", "bob")
    for number in range(200, 205):
        it.now += 1.0
        it.run(number, chr(number) * 2, "alice")
        it.feed(SleepWanted(keys(chr(number) * 2)))
        it.end_all()
    assert it.slots(Tier.DRAM) == {"valid": 8}
    it.feed(SleepWanted(keys("ab")))  # colder than anything there
    it.end_all()
    assert it.where("ab") == ["D", "D"]


def test_on_nvme_a_flood_displaces_its_own_blocks() -> None:
    it = script(dram_slots=4, nvme_slots=16, clean_share=0.0)
    it.run(1, "abcdefgh", "bob")
    it.record("abcdefgh")
    it.feed(SleepWanted(keys("abcdefgh"), Tier.NVME))
    it.end_all()
    for number in range(200, 210):
        it.now += 1.0
        it.run(number, chr(number) * 3, "alice")
        it.record(chr(number) * 3)
        it.feed(SleepWanted(keys(chr(number) * 3), Tier.NVME))
        it.end_all()
    assert it.where("abcdefgh") == ["N"] * 8


def test_what_an_earlier_process_left_is_its_owners() -> None:
    it = script(nvme_slots=16)
    chain = keys("abcdefgh")
    parents: list[BlockKey | None] = [None, *chain[:-1]]
    found = [(key, parent, place, place, 0.0) for place, (key, parent) in enumerate(zip(chain, parents, strict=True))]
    it.catalogue = {slot: key for key, _, _, slot, _ in found}
    it.feed(BlocksFound(found, {chain[0]: "bob"}))
    for number in range(200, 210):
        it.now += 1.0
        it.run(number, chr(number) * 3, "alice")
        it.record(chr(number) * 3)
        it.feed(SleepWanted(keys(chr(number) * 3), Tier.NVME))
        it.end_all()
    assert it.where("abcdefgh") == ["N"] * 8


def test_the_high_mark_of_hbm_moves_down_blocks_of_who_uses_most() -> None:
    it = script(dram_slots=32, hbm_high=0.6, hbm_low=0.5, clean_share=0.0)
    it.run(1, "abc", "bob")
    flood(it, "alice", 4)
    it.end_all()
    assert it.where("abc") == ["H"] * 3
    assert it.where("ddd") == ["HD"] * 3


# --- admission ----------------------------------------------------------------------------


def test_turns_beyond_a_tenants_share_wait_for_its_own_and_nobody_elses_blocks() -> None:
    it = script()
    it.run(1, "abcdefgh", "bob")
    assert granted(it.arrive(2, "ijklm", tenant="alice")) == [2]
    assert granted(it.arrive(3, "nopqr", tenant="alice")) == []  # there are blocks of bob's that could leave
    assert it.where("abcdefgh") == ["H"] * 8
    assert granted(it.stop(2)) == [3]
    assert it.where("abcdefgh") == ["H"] * 8


def test_a_turn_larger_than_the_share_runs_alone_of_its_tenant() -> None:
    it = script()
    it.run(1, "abcdefgh", "bob")
    assert granted(it.arrive(2, "0123456789", tenant="alice")) == [2]
    assert it.where("abcdefgh") == ["H"] * 5 + [""] * 3
    assert granted(it.arrive(3, "nop", tenant="alice")) == []
    assert granted(it.stop(2)) == [3]


def test_a_turn_within_its_share_runs_beside_a_flood_that_waits() -> None:
    it = script(max_running=4, max_queue=50)
    for number in range(2, 20):
        it.arrive(number, chr(200 + number) * 2, tenant="alice")
    assert it.running == {2, 3, 4, 5}
    assert granted(it.arrive(30, "ab", tenant="bob")) == []  # as many run as may
    assert granted(it.stop(2)) == [30]
    assert granted(it.stop(3)) == [6]  # two of each, if bob had more
    it.arrive(31, "ac", tenant="bob")
    it.arrive(32, "ad", tenant="bob")
    assert granted(it.stop(4)) == [31]
    assert granted(it.stop(5)) == [7]  # alice has one left, bob two
    assert granted(it.stop(6)) == [8]
    assert granted(it.stop(31)) == [32]


def test_priorities_are_a_tenants_own() -> None:
    it = script(max_running=1, max_queue=50)
    it.arrive(1, "a", tenant="alice")
    it.arrive(2, "b", tenant="alice", priority=-100)
    it.arrive(3, "c", tenant="bob", priority=5)
    it.arrive(4, "d", tenant="bob", priority=4)
    assert granted(it.stop(1)) == [2]
    it.arrive(5, "e", tenant="alice", priority=-200)
    assert granted(it.stop(2)) == [4]  # bob's turn came before alice's third, and which of his he says himself
    assert granted(it.stop(4)) == [3]


def test_an_old_turn_that_waits_for_its_own_share_holds_back_nobody_else() -> None:
    it = script(hbm_slots=16, age_limit_seconds=10.0)
    it.run(1, "ab", "bob")
    it.arrive(2, "ijklmno", tenant="alice")
    assert granted(it.arrive(3, "pqrstu", tenant="alice")) == []
    it.wait(11.0)
    assert granted(it.arrive(4, "acd", tenant="bob")) == [4]
    assert granted(it.arrive(5, "v", tenant="alice")) == []  # younger than one of hers that is old
    assert 3 in granted(it.stop(2))


def test_growing_beyond_a_share_makes_the_tenants_own_younger_turn_wait() -> None:
    it = script(hbm_slots=12, output_slice_tokens=4)
    it.run(1, "abcdef", "bob")
    it.arrive(2, "i", output_tokens=40, tenant="alice")
    it.arrive(3, "p", output_tokens=40, tenant="alice")
    assert it.running == {2, 3}
    assert suspended(it.grow(2, 2)) == [3]
    assert it.where("abcdef") == ["H"] * 6
    it.stop(3, StopReason.SUSPENDED)
    assert it.where("abcdef") == ["H"] * 6


def test_growing_takes_others_blocks_only_where_the_turn_would_end_otherwise() -> None:
    it = script(hbm_slots=12, output_slice_tokens=4)
    it.run(1, "abcdef", "bob")
    it.arrive(2, "ijkl", output_tokens=40, tenant="alice")
    assert any(isinstance(action, GrantSlots) for action in it.grow(2, 2))
    assert it.where("abcdef") == ["H"] * 4 + [""] * 2


def test_no_turn_is_suspended_for_a_tenant_that_uses_more_than_its_own() -> None:
    it = script(hbm_slots=12, age_limit_seconds=5.0, output_slice_tokens=4)
    it.arrive(1, "ab", tenant="alice")
    it.arrive(2, "cd", tenant="alice")
    it.arrive(3, "xyz", tenant="bob")
    assert it.running == {1, 2}
    it.wait(6.0)
    assert it.running == {1, 2}


# --- hints --------------------------------------------------------------------------------


def test_hints_of_one_tenant_find_no_room_in_the_share_of_another() -> None:
    it = script(dram_slots=32, clean_share=0.0)
    it.run(1, "abcdefgh", "bob")
    it.run(2, "ijklmno", "alice")
    it.feed(SleepWanted(keys("ijklmno")))
    it.end_all()
    it.run(3, "qrstuv", "alice")
    assert copies(it.feed(WakeHinted(WakeId(1), keys("ijklmno"), Tier.HBM, 10.0)))
    it.end_all()
    assert [where[0] for where in it.where("abcdefgh")] == ["H"] * 8
    assert set(it.where("ijklmno")) == {"HD"}


def test_a_hint_ends_for_turns_of_its_own_tenant_and_of_who_uses_less() -> None:
    it = script(dram_slots=32, clean_share=0.0, max_transfers=1)
    it.put_to_sleep("abcdefghij")  # of nobody, who is a tenant here
    it.feed(WakeHinted(WakeId(1), keys("abcdefghij"), Tier.HBM, 10.0))
    actions = it.arrive(2, "klmnop", tenant="bob")
    assert [action.status for action in actions if isinstance(action, AnswerWake)] == [WakeStatus.NO_ROOM]
    assert granted(actions) == [2]
