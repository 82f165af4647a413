"""The measurements of sleeping sessions move what they say they move; how fast is for a quiet machine to tell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from app.settings import Settings
from bench.errors import BenchFailed
from bench.tiers import choice, rig, tables
from bench.tiers.long import LongPlan, LongSamples
from bench.tiers.many import ManyPlan, ManySamples
from bench.tiers.restore import RestorePlan, RestoreSamples
from bench.tiers.rss import RssPlan, RssSamples
from bench.tiers.wake import WakePlan, WakeSamples

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(cache_dir: Path) -> rig.Model:
    return rig.load(Settings(cache_dir=cache_dir, attention="fast"))


def shown(samples: choice.Samples) -> str:
    """As a person reads it; that JSON takes it, too, is checked on the way."""
    json.dumps(tables.part(samples))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(tables.table(samples))
    return capture.get()


def test_a_session_sleeps_and_wakes_whole_in_every_round(model: rig.Model) -> None:
    told: list[str] = []

    samples = choice.run(model, WakePlan(tokens=130, rounds=3, recomputes=2), told.append)

    assert isinstance(samples, WakeSamples)
    assert told == ["recompute 1", "recompute 2", "wake 1", "wake 2", "wake 3"]
    assert (samples.blocks, samples.bytes) == (4, 4 * model.layout.slot_bytes)
    assert (len(samples.wake_seconds), len(samples.recompute_seconds)) == (3, 2)
    assert "4 blocks" in shown(samples)


def test_cycles_copy_every_block_out_and_back_within_drams_slots(model: rig.Model) -> None:
    plan = RssPlan(cycles=20)
    told: list[str] = []

    samples = choice.run(model, plan, told.append)

    assert isinstance(samples, RssSamples)
    assert (samples.sleeps, samples.wakes) == (20, 20)
    assert samples.blocks_out == samples.blocks_in == 20 * plan.blocks
    assert samples.peak_dram_slots == samples.dram_slots == 16
    assert samples.highest_dram_slot == 15
    assert samples.cycles == list(range(21))
    assert len(told) == plan.num_rounds == 20
    assert "DRAM never above its 16 slots" in shown(samples)


def test_random_turns_of_many_sessions_find_their_histories(model: rig.Model) -> None:
    plan = ManyPlan(sessions=6, tokens=80, turns=3, in_flight=3, hbm_sessions=2, answer_tokens=4, seed=1)
    told: list[str] = []

    samples = choice.run(model, plan, told.append)

    assert isinstance(samples, ManySamples)
    assert samples.failures == []
    assert (len(samples.first), len(samples.later)) == (6, 12)
    # 84 tokens after the first turn and 104 after the second: two full blocks, then three.
    assert samples.reused_blocks == samples.storable_blocks == 6 * (2 + 3)
    assert any(each.dram_tokens for each in samples.later)
    assert len(told) == plan.num_rounds == 18
    assert "0 failures in 18 turns" in shown(samples)


def test_prefixes_come_back_from_dram_and_from_nvme_in_every_round(model: rig.Model, tmp_path: Path) -> None:
    samples = choice.run(model, RestorePlan(lengths=(64, 130), rounds=2), print, tmp_path)

    assert isinstance(samples, RestoreSamples)
    assert [(point.tokens, point.bytes // model.layout.slot_bytes) for point in samples.points] == [(64, 2), (130, 4)]
    for point in samples.points:
        assert len(point.recompute_seconds) == 2
        assert {tier: len(seconds) for tier, seconds in point.restore_seconds.items()} == {"dram": 2, "nvme": 2}
    assert set(samples.raw) == {"dram", "nvme"}
    assert "the disk read in the same pieces" in shown(samples)
    assert list(tmp_path.iterdir()) == [], "nothing of it stays"


def test_long_sessions_resume_whole_from_three_tiers(model: rig.Model, tmp_path: Path) -> None:
    plan = LongPlan(sessions=5, tokens=100, hbm_sessions=1, dram_sessions=2, answer_tokens=4, seed=1)

    samples = choice.run(model, plan, print, tmp_path)

    assert isinstance(samples, LongSamples)
    assert samples.num_whole == 5
    assert any(each.nvme_tokens for each in samples.resumed)
    assert "NVMe for all" in shown(samples)


def test_all_measurements_run_unless_some_are_chosen_and_sizes_go_to_the_one_that_has_them() -> None:
    assert list(choice.plans([], {"cycles": 7}, seed=1)) == ["wake", "restore", "decode", "rss", "long", "many"]

    plans = choice.plans(["many", "rss"], {"sessions": 5, "cycles": 7, "turns": None}, seed=1)

    assert plans == {"rss": RssPlan(cycles=7, seed=1), "many": ManyPlan(sessions=5, seed=1)}


@pytest.mark.parametrize("chosen", [[], ["long", "many"], ["wake"]], ids=str)
def test_a_size_that_several_or_none_of_the_chosen_have_is_refused(chosen: list[str]) -> None:
    with pytest.raises(BenchFailed, match="--sessions is a size of one measurement: give --long or --many"):
        choice.plans(chosen, {"sessions": 5}, seed=1)
