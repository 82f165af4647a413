"""Restore or recompute, with injected rates: on the machine of the tests the gate would never fire."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config import PlannerConfig
from kvstore.cost import CONFIRMED_SECONDS, Cost, Rate
from kvstore.events import AnswerWake, GrantTurn, Miss, StepEnded, WakeHinted, WakeStatus
from kvstore.types import Tier, WakeId
from tests.kvstore.script import Script, copies, keys, the_grant

SLOW_DISK: dict[str, Any] = {"dram_blocks_per_second": 1_000.0, "nvme_blocks_per_second": 10.0}
"""A block of 4 tokens from NVMe: 101 ms; to compute it at 1,000 tokens a second: 5 ms with the margin."""


def cost(prefill: float = 1_000.0, dram: float = 1_000.0, nvme: float = 10.0, block_tokens: int = 4) -> Cost:
    return Cost(
        PlannerConfig(
            hbm_slots=1,
            block_tokens=block_tokens,
            max_running=1,
            max_queue=1,
            age_limit_seconds=1.0,
            prefill_tokens_per_second=prefill,
            dram_blocks_per_second=dram,
            nvme_blocks_per_second=nvme,
        )
    )


def tiered(**more: Any) -> Script:
    return Script(
        hbm_slots=16, dram_slots=16, nvme_slots=16, **({"clean_share": 0.0, "hbm_high": 1.0, "dram_high": 1.0} | more)
    )


# --- rates ------------------------------------------------------------------------------


def test_a_rate_is_its_seed_until_something_is_observed_and_then_what_was_observed_lately() -> None:
    rate = Rate(100.0)
    assert rate.per_second(0.0) == 100.0
    for _ in range(200):
        rate.note(50.0, 1.0, now=1.0)
    assert rate.per_second(1.0) == pytest.approx(50.0, rel=0.01)


def test_a_rate_that_nothing_confirms_falls_back_to_its_seed() -> None:
    rate = Rate(100.0)
    rate.note(1.0, 10.0, now=0.0)
    assert rate.per_second(CONFIRMED_SECONDS) < 100.0
    assert rate.per_second(CONFIRMED_SECONDS + 1.0) == 100.0


def test_copies_that_share_a_disk_are_timed_together() -> None:
    it = cost(nvme=0.0)
    reads = it.reads[Tier.NVME]
    for _ in range(4):
        reads.begin(8, now=10.0)
    for moment in (11.0, 11.0, 11.0, 12.0):
        reads.end(8, 8, moment)
    assert reads.rate.per_second(12.0) == pytest.approx(16.0, rel=0.15)
    assert reads.num_under_way == 0


def test_a_read_that_brought_nothing_tells_nothing() -> None:
    it = cost()
    it.reads[Tier.NVME].begin(8, 0.0)
    it.reads[Tier.NVME].end(8, 0, 50.0)
    assert it.reads[Tier.NVME].rate.per_second(50.0) == 10.0


def test_only_steps_that_mostly_prefill_tell_its_rate() -> None:
    it = cost(prefill=0.0)
    it.note_step(1.0, prefill_tokens=8, decode_tokens=0, now=0.0)
    it.note_step(1.0, prefill_tokens=64, decode_tokens=100, now=0.0)
    assert not it.decides(0.0)
    it.note_step(1.0, prefill_tokens=490, decode_tokens=10, now=0.0)
    assert it.prefill.per_second(0.0) == 500.0


# --- the decision -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "nvme", "worth"),
    [
        pytest.param(700.0, 1_800.0, 10, id="a small model on a CPU, from a disk"),
        pytest.param(1_000_000.0, 1_800.0, 0, id="the same on a large GPU"),
        pytest.param(0.0, 1.0, 10, id="prefill was never measured"),
    ],
)
def test_what_takes_less_time_is_done(prefill: float, nvme: float, worth: int) -> None:
    it = cost(prefill, dram=10_000.0, nvme=nvme, block_tokens=32)
    sources = [Tier.NVME] * 10
    assert (it.num_worth_restoring(sources, 0.0) if it.decides(0.0) else 10) == worth


def test_a_chain_is_restored_as_far_as_that_gains() -> None:
    sources = [Tier.DRAM] * 5 + [Tier.NVME] * 5
    assert cost().num_worth_restoring(sources, 0.0) == 5
    assert cost(nvme=1_000.0).num_worth_restoring(sources, 0.0) == 10


def test_a_gap_that_costs_is_worth_it_for_what_lies_behind() -> None:
    assert cost(nvme=220.0).num_worth_restoring([Tier.NVME] * 2 + [Tier.DRAM] * 2, 0.0) == 4


def test_what_is_being_read_already_comes_first() -> None:
    it = cost(nvme=400.0)
    assert it.num_worth_restoring([Tier.NVME] * 4, 0.0) == 4
    it.reads[Tier.NVME].begin(40, 0.0)
    assert it.num_worth_restoring([Tier.NVME] * 4, 0.0) == 0


# --- in the planner ---------------------------------------------------------------------


def test_a_turn_for_which_recompute_is_cheaper_is_granted_at_once_and_told_why() -> None:
    script = tiered(prefill_tokens_per_second=1_000.0, **SLOW_DISK)
    script.put_to_sleep_in_nvme("abc")
    grant = the_grant(script.arrive(1, "abc", output_tokens=0))
    assert (grant.cached_tokens, grant.miss) == (0, Miss.RECOMPUTE_CHEAPER)
    assert script.copies == {}
    assert script.planner.snapshot().totals.recomputes_cheaper == 1
    script.fill(1, 0, 1, 2)
    script.stop(1)
    assert script.where("abc") == ["HN", "HN", "HN"]
    grant = the_grant(script.arrive(2, "abc"))
    assert (grant.reused_blocks, grant.miss) == ((3, 0, 0), None)


def test_what_dram_has_is_restored_and_the_rest_computed() -> None:
    script = tiered(**SLOW_DISK)
    script.put_to_sleep_in_nvme("abcd")
    script.feed(WakeHinted(WakeId(1), keys("ab"), Tier.DRAM, 30.0))
    script.end_all()
    script.feed(StepEnded((), seconds=1.0, prefill_tokens=1_000))
    grant = the_grant(script.arrive(1, "abcd", output_tokens=0) + script.end_all())
    assert (grant.cached_tokens, grant.reused_blocks, grant.miss) == (8, (0, 0, 2), Miss.RECOMPUTE_CHEAPER)


@pytest.mark.parametrize("off", [{"cost_gate": "off"}, {"prefill_tokens_per_second": 0.0}])
def test_with_the_gate_off_or_prefill_unknown_what_is_there_is_restored(off: dict[str, Any]) -> None:
    script = tiered(**({"prefill_tokens_per_second": 1_000.0} | SLOW_DISK | off))
    script.put_to_sleep_in_nvme("abc")
    assert the_grant(script.arrive(1, "abc") + script.end_all()).reused_blocks == (0, 0, 3)


def test_a_hint_for_what_is_cheaper_to_compute_is_declined() -> None:
    script = tiered(prefill_tokens_per_second=1_000.0, **SLOW_DISK)
    script.put_to_sleep_in_nvme("abc")
    actions = script.feed(WakeHinted(WakeId(1), keys("abc"), Tier.HBM, 30.0))
    assert actions == [AnswerWake(WakeId(1), WakeStatus.RECOMPUTE_CHEAPER, 0, Tier.HBM)]


def test_what_the_store_sees_replaces_what_start_up_measured() -> None:
    script = tiered(prefill_tokens_per_second=100.0, dram_blocks_per_second=1_000.0, nvme_blocks_per_second=100.0)
    script.put_to_sleep_in_nvme("abcdefgh")
    lift = copies(script.arrive(1, "abcdefgh", output_tokens=0))
    assert len(lift) == 1
    script.now += 1.9  # four blocks a second: more than the 50 ms that computing one takes
    script.end_all()
    script.stop(1)
    script.put_to_sleep_in_nvme("pq")
    for _ in range(40):
        script.feed(StepEnded((), seconds=0.1, prefill_tokens=100))
    snapshot = script.planner.snapshot()
    assert snapshot.prefill_tokens_per_second == pytest.approx(1_000.0, rel=0.2)
    assert snapshot.tier(Tier.NVME).read_blocks_per_second < 60.0
    grant = the_grant(script.arrive(2, "pq", output_tokens=0))
    assert isinstance(grant, GrantTurn)
    assert grant.miss is Miss.RECOMPUTE_CHEAPER
