"""Waking a branch before its turn comes: by scripts."""

from __future__ import annotations

from typing import Any

from kvstore.events import SessionClosed, SleepWanted
from kvstore.returns import LEAST_GAPS, Gap
from kvstore.types import Tier
from tests.kvstore.script import Script, copies, keys, the_grant


def expecting(**more: Any) -> Script:
    return Script(
        hbm_slots=8,
        dram_slots=16,
        **({"clean_share": 0.0, "hbm_high": 1.0, "predict_returns": True, "predict_lead_seconds": 1.0} | more),
    )


def sleeper(gap: float, times: int = LEAST_GAPS, **record: Any) -> Script:
    """A branch at "ab" that came back `times` times after `gap` seconds each, and sleeps."""
    script = expecting()
    script.run(1, "ab")
    script.record("ab", **record)
    for turn in range(2, 2 + times):
        script.now += gap
        script.run(turn, "ab")
        script.record("ab", old="ab", **record)
    script.feed(SleepWanted(keys("ab")))
    script.end_all()
    assert script.where("ab") == ["D", "D"]
    return script


def predictions(script: Script) -> tuple[int, int]:
    totals = script.planner.snapshot().totals
    return totals.predictions, totals.predictions_used


def test_a_branch_that_comes_back_like_clockwork_is_awake_when_it_does_and_nobody_is_told() -> None:
    script = sleeper(20.0)
    assert script.wait(18.9) == []
    (load,) = script.wait(0.2)
    assert copies([load])[0].keys == keys("ab")
    assert script.end_all() == []
    script.now += 1.0
    assert the_grant(script.arrive(99, "ab")).reused_blocks == (0, 2, 0)
    assert predictions(script) == (1, 1)


def test_what_is_awake_is_not_woken() -> None:
    script = sleeper(20.0)
    script.run(50, "ab")
    script.record("ab", old="ab")
    script.wait(1_000.0)
    assert predictions(script) == (0, 0)


def test_a_turn_that_does_not_come_leaves_its_blocks_to_go_first_again() -> None:
    script = sleeper(20.0)
    script.wait(19.5)
    script.end_all()
    script.now += 500.0
    script.run(50, "uvwxyz")
    assert script.where("ab")[1] == "D"
    script.now += 1.0
    script.arrive(51, "ab", output_tokens=0)
    assert predictions(script) == (1, 0)


def test_gaps_after_tool_calls_say_nothing_about_humans() -> None:
    script = sleeper(2.0, after_tool_call=True)
    script.record("ab", old="ab", after_tool_call=False)
    script.wait(100.0)
    assert predictions(script) == (0, 0)
    script.record("ab", old="ab", after_tool_call=True)
    script.wait(2.0)
    assert predictions(script) == (1, 0)


def test_what_the_client_expects_goes_before_what_was_seen() -> None:
    script = sleeper(2.0, expected_idle_seconds=60.0)
    assert script.wait(58.0) == []
    assert len(copies(script.wait(1.0))) == 1


def test_a_branch_that_comes_when_it_likes_is_not_waited_for() -> None:
    gap = Gap()
    for seconds in (1.0, 100.0, 2.0, 500.0, 1.0):
        gap = gap.and_one_of(seconds)
    assert gap.deviation > 1.0
    steady = Gap()
    for seconds in (9.0, 11.0, 10.0, 10.0):
        steady = steady.and_one_of(seconds)
    assert steady.deviation < 0.2


def test_a_closed_branch_is_not_woken() -> None:
    script = sleeper(20.0)
    script.run(60, "abc")
    script.record("abc")
    script.feed(SessionClosed((keys("ab")[-1],)))
    script.wait(100.0)
    assert predictions(script) == (0, 0)


def test_it_is_off_unless_asked_for() -> None:
    script = expecting(predict_returns=False)
    script.run(1, "ab")
    for turn in range(2, 9):
        script.now += 10.0
        script.run(turn, "ab")
        script.record("ab", old="ab")
    script.feed(SleepWanted(keys("ab")))
    script.end_all()
    assert script.planner.next_timeout() is None
    assert script.slots(Tier.HBM) == {"free": 8}
