"""Look-ahead from the queue: what waiting turns need is brought up, or kept, before there is room to admit them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.events import Miss, SleepWanted, TransferEnd, TurnCancelled, WakeHinted
from kvstore.types import Tier, TurnId, WakeId
from tests.kvstore.script import Script, copies, granted, keys, the_grant

if TYPE_CHECKING:
    from kvstore.events import Action


def tiered(hbm_slots: int = 8, dram_slots: int = 16, **more: Any) -> Script:
    """One turn runs at a time, and nothing is copied ahead of need unless asked for."""
    plain = {"clean_share": 0.0, "hbm_high": 1.0, "max_running": 1}
    return Script(hbm_slots=hbm_slots, dram_slots=dram_slots, **(plain | more))


def loads(actions: list[Action]) -> list[tuple[Any, ...]]:
    return [copy.keys for copy in copies(actions) if copy.target < copy.source]


def test_a_turn_that_waits_for_its_place_finds_its_blocks_awake_when_it_gets_it() -> None:
    script = tiered()
    script.put_to_sleep("abc")
    script.arrive(1, "xy")
    assert loads(script.arrive(2, "abc")) == [keys("abc")]
    script.end_all()
    assert script.where("abc") == ["HD"] * 3
    assert script.slots(Tier.HBM) == {"free": 1, "open": 4, "valid": 3}, "nothing is held for a turn that waits"
    grant = the_grant(script.stop(1))
    assert (grant.turn, grant.cached_tokens, grant.reused_blocks) == (2, 12, (0, 3, 0))
    assert grant.woken_from_queue


def test_a_turn_admitted_at_once_was_not_woken_from_the_queue() -> None:
    script = tiered()
    script.put_to_sleep("abc")
    script.arrive(1, "abc")
    assert not the_grant(script.end_all()).woken_from_queue


def test_a_turn_whose_loads_begin_when_it_is_admitted_after_a_wait_was_woken_from_the_queue() -> None:
    script = tiered(look_ahead_turns=0)
    script.put_to_sleep("abc")
    script.arrive(1, "xy")
    assert loads(script.arrive(2, "abc")) == []
    script.stop(1)
    assert the_grant(script.end_all()).woken_from_queue


def test_only_the_first_of_the_queue_are_looked_at() -> None:
    script = tiered(hbm_slots=12, look_ahead_turns=2)
    for path in ("ab", "cd", "ef"):
        script.put_to_sleep(path)
    script.arrive(1, "x")
    assert [loads(script.arrive(turn, path)) for turn, path in ((2, "ab"), (3, "cd"), (4, "ef"))] == [
        [keys("ab")],
        [keys("cd")],
        [],
    ]
    script.end_all()
    assert loads(script.stop(1)) == [keys("ef")], "with the first admitted, the next one's turn has come"


def test_as_much_of_a_chain_is_loaded_as_slots_are_free() -> None:
    script = tiered(hbm_slots=6)
    script.put_to_sleep("abcd")
    script.arrive(1, "xy", output_tokens=4)
    assert loads(script.arrive(2, "abcd")) == [keys("abcd")[:2]]
    script.end_all()
    assert script.where("abcd") == ["HD", "HD", "D", "D"]


def test_idle_blocks_with_a_copy_below_make_room_and_last_copies_do_not() -> None:
    script = tiered(hbm_slots=8)
    script.put_to_sleep("ab")
    script.put_to_sleep("cd")
    script.feed(WakeHinted(WakeId(1), keys("cd"), Tier.HBM, 0.0))
    script.end_all()
    script.now = 1.0
    script.run(1, "pq")
    script.now = 2.0
    script.arrive(2, "xy", output_tokens=4)
    assert loads(script.arrive(3, "ab")) == [keys("ab")]
    script.end_all()
    assert script.where("ab") == ["HD", "HD"]
    assert script.where("pq") == ["H", "H"]
    assert script.planner.snapshot().totals.evicted == 0


def test_two_waiters_that_do_not_both_fit_do_not_load_in_turn_for_ever() -> None:
    script = tiered(hbm_slots=6)
    script.put_to_sleep("abcd")
    script.put_to_sleep("efgh")
    script.arrive(1, "xy", output_tokens=4)
    script.arrive(2, "abcd")
    script.arrive(3, "efgh")
    script.end_all()
    loaded = script.planner.snapshot().totals.loaded
    for _ in range(5):
        assert script.wait(1.0) == []
    assert script.planner.snapshot().totals.loaded == loaded


def test_what_a_waiter_needs_leaves_dram_after_what_nobody_waits_for() -> None:
    script = tiered(hbm_slots=6, dram_slots=4)
    for path in ("ab", "cd"):
        script.put_to_sleep(path)
        script.now += 1.0
    script.run(1, "ef")
    script.arrive(2, "xy", output_tokens=4)
    assert loads(script.arrive(3, "ab")) == [], "ef has no copy below, so no slot can be had for nothing"
    script.now += 1.0
    script.feed(SleepWanted(keys("ef")))
    assert script.where("ab") == ["D", "D"], "it is older than cd, but a turn waits for it"
    assert script.where("cd") == ["", ""]
    assert [copy.keys for copy in script.copies.values()] == [keys("ef")]


def test_nothing_is_loaded_ahead_while_a_running_turn_lacks_slots() -> None:
    script = tiered(hbm_slots=6, max_running=2)
    script.put_to_sleep("ab")
    script.run(1, "pqrs")
    script.arrive(2, "xyz", output_tokens=0)
    assert not granted(script.arrive(3, "ab")), "the copies down for 2 are under way"
    assert all(copy.target is Tier.DRAM for copy in script.copies.values())


def test_blocks_loaded_ahead_give_way_to_a_turn_that_may_be_admitted() -> None:
    script = tiered(hbm_slots=8, max_running=2)
    script.put_to_sleep("abcd")
    script.arrive(1, "uvw", output_tokens=4)
    script.arrive(2, "abcd", output_tokens=4)
    script.end_all()
    assert script.where("abcd") == ["HD", "HD", "HD", "D"]
    grants = script.arrive(3, "x", output_tokens=1, priority=-1)
    assert granted(grants) == [3]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_load_ahead_that_fails_or_comes_late_is_not_tried_again_for_that_turn(is_late: bool) -> None:
    script = tiered(wake_deadline_seconds=2.0)
    script.put_to_sleep("abc")
    script.arrive(1, "xy")
    (load,) = copies(script.arrive(2, "abc"))
    actions = script.wait(3.0) if is_late else script.end(load.transfer, 1, TransferEnd.FAILED)
    assert loads(actions) == []
    actions = script.stop(1)
    grant = the_grant(actions)
    assert loads(actions) == []
    assert grant.cached_tokens == (0 if is_late else 4)
    assert grant.miss is (Miss.LOAD_TIMEOUT if is_late else Miss.LOAD_FAILED)
    if is_late:
        script.end(load.transfer)


def test_a_waiter_that_leaves_takes_its_loads_along() -> None:
    script = tiered()
    script.put_to_sleep("abc")
    script.arrive(1, "xy")
    (load,) = copies(script.arrive(2, "abc"))
    actions = script.feed(TurnCancelled(TurnId(2)))
    assert [repr(action) for action in actions] == [f"CancelTransfer(transfer={load.transfer})"]
    script.end(load.transfer, 0, TransferEnd.CANCELLED)
    script.stop(1)


def test_the_loads_of_a_hint_go_on_when_its_turn_has_to_wait() -> None:
    script = tiered()
    script.put_to_sleep("abc")
    script.arrive(1, "xy")
    (load,) = copies(script.feed(WakeHinted(WakeId(5), keys("abc"), Tier.HBM, 1.0)))
    assert not [action for action in script.arrive(2, "abc", wake=WakeId(5)) if "Cancel" in repr(action)]
    script.end(load.transfer)
    assert the_grant(script.stop(1)).cached_tokens == 12


def test_from_nvme_a_chain_is_lifted_to_dram_while_hbm_has_no_room() -> None:
    script = tiered(hbm_slots=4, dram_slots=4, nvme_slots=16, dram_high=0.5, dram_low=0.2, max_running=2)
    script.put_to_sleep_in_nvme("abc")
    script.arrive(1, "xyz", output_tokens=4)
    (lift,) = copies(script.arrive(2, "abc"))
    assert (lift.source, lift.target) == (Tier.NVME, Tier.DRAM)
    assert lift.keys == keys("abc")[:2], "more would be above the mark from which DRAM is emptied"
    assert script.end(lift.transfer) == []
    assert script.where("abc") == ["DN", "DN", "N"]
    assert script.wait(1.0) == []
