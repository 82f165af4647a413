"""Hypothesis drives the planner against the plain model of `world`: what is where, and who may touch it.

200 runs of 50 rules are 10,000 steps; each is several events, with check() after every one.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.config import PlannerConfig
from kvstore.events import TierHealth, TransferEnd, WritePolicy
from kvstore.types import Tier
from tests.kvstore.world import ALPHABET, World, tenant_of

CONFIGS = st.builds(
    PlannerConfig,
    hbm_slots=st.integers(4, 16),
    block_tokens=st.just(2),
    max_running=st.integers(1, 5),
    max_queue=st.integers(0, 6),
    age_limit_seconds=st.just(5.0),
    output_slice_tokens=st.sampled_from([1, 4]),
    dram_slots=st.sampled_from([0, 3, 12, 60]),
    nvme_slots=st.sampled_from([0, 6, 40]),
    ring_slots=st.integers(1, 4),
    max_transfers=st.integers(1, 4),
    max_hints=st.just(3),
    predict_returns=st.booleans(),
    late_reads_until_off=st.integers(1, 3),
    slot_bytes=st.just(1),
    nvme_write_policy=st.sampled_from(WritePolicy),
    nvme_rated_bytes_per_day=st.sampled_from([0, 20]),
    nvme_min_tokens=st.sampled_from([0, 6]),
    idle_to_nvme_seconds=st.just(3.0),
    prefill_tokens_per_second=st.sampled_from([0.0, 20.0]),
    dram_blocks_per_second=st.just(100.0),
    nvme_blocks_per_second=st.sampled_from([5.0, 50.0]),
)
FAILURES = st.sampled_from(sorted(set(TransferEnd) - {TransferEnd.DONE}, key=str))
NEW_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
LENGTHS = st.integers(0, 40)
TENANTS = st.sampled_from([0, 0, 1, 2])


class PlannerMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS)
    def start(self, config: PlannerConfig) -> None:
        self.world = World(config)

    def history(self, data: st.DataObject, length: int = 1_000) -> tuple[int, ...]:
        """Up to `length` tokens of one of the last conversations, or nothing."""
        recent = self.world.histories[-8:]
        return data.draw(st.sampled_from(recent))[:length] if recent else ()

    @rule(
        data=st.data(),
        tenant=TENANTS,
        length=LENGTHS,
        new=NEW_TOKENS,
        output=st.integers(0, 10),
        priority=st.integers(-1, 1),
    )
    def arrive(self, data: st.DataObject, tenant: int, length: int, new: list[int], output: int, priority: int) -> None:
        hints = sorted(self.world.hints)
        hint = data.draw(st.sampled_from([None, *hints])) if hints else None
        history = self.history(data, length)
        tenant = tenant_of(history) if history else tenant
        tokens = [*history, *(tenant * ALPHABET + token for token in new)]
        cache = data.draw(st.booleans()) or output > 1
        self.world.arrive(tokens, output, priority, cache=cache, hint=hint, to_nvme=output % 2 == 0)

    @rule(
        paces=st.lists(st.sampled_from([1, 2, 5, 40]), min_size=1, max_size=3),
        to_nvme=st.sampled_from([True, True, False]),
        records=st.sampled_from([True, True, False]),
    )
    def step(self, paces: list[int], to_nvme: bool, records: bool) -> None:
        self.world.step(paces)
        if records:
            self.world.record_ended(to_nvme)

    @precondition(lambda self: self.world.copies)
    @rule(data=st.data(), failure=st.none() | FAILURES, good=st.integers(0, 7))
    def end_copy(self, data: st.DataObject, failure: TransferEnd | None, good: int) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.world.copies)))
        self.world.end_copy(transfer, good, failure or TransferEnd.DONE)

    @precondition(lambda self: self.world.copies)
    @rule()
    def end_all_copies(self) -> None:
        for transfer in list(self.world.copies):
            self.world.end_copy(transfer, 0, TransferEnd.DONE)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0, 6.0, -3.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.clients))))

    @precondition(lambda self: self.world.histories)
    @rule(data=st.data(), tier=st.sampled_from([Tier.HBM, Tier.DRAM]), hold=st.sampled_from([0.0, 3.0]))
    def hint(self, data: st.DataObject, tier: Tier, hold: float) -> None:
        self.world.hint(self.history(data), tier, hold)

    @precondition(lambda self: self.world.hints)
    @rule(data=st.data())
    def cancel_hint(self, data: st.DataObject) -> None:
        self.world.cancel_hint(data.draw(st.sampled_from(sorted(self.world.hints))))

    @precondition(lambda self: self.world.histories)
    @rule(data=st.data(), keep=st.sampled_from([0.0, 4.0]), pinned=st.booleans(), final=st.booleans())
    def record(self, data: st.DataObject, keep: float, pinned: bool, final: bool) -> None:
        branch = data.draw(st.sampled_from([None, *self.world.branches]))
        wishes = {"keep_seconds": keep, "pinned": pinned, "final": final and pinned}
        self.world.record(branch, self.history(data), to_nvme=data.draw(st.booleans()) or not final, **wishes)

    @precondition(lambda self: self.world.branches)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(data.draw(st.sampled_from(self.world.branches)))

    @precondition(lambda self: self.world.histories)
    @rule(data=st.data(), tier=st.sampled_from([Tier.DRAM, Tier.NVME]))
    def sleep(self, data: st.DataObject, tier: Tier) -> None:
        self.world.sleep(self.history(data), tier)

    @precondition(lambda self: self.world.erasing)
    @rule()
    def erase(self) -> None:
        self.world.erase()

    @precondition(lambda self: self.world.probes)
    @rule(health=st.sampled_from(TierHealth))
    def answer_probe(self, health: TierHealth) -> None:
        self.world.answer_probe(health)

    @precondition(lambda self: self.world.config.nvme_slots)
    @rule(seconds=st.sampled_from([0.0, 5.0]))
    def drain(self, seconds: float) -> None:
        self.world.drain(seconds)

    @precondition(lambda self: self.world.catalogue)
    @rule()
    def crash(self) -> None:
        self.world.crash()

    @rule(data=st.data(), health=st.sampled_from(TierHealth))
    def change_health(self, data: st.DataObject, health: TierHealth) -> None:
        lower = [counts.tier for counts in self.world.planner.snapshot().tiers[1:]]
        if lower:
            self.world.set_health(data.draw(st.sampled_from(lower)), health)

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @invariant()
    def shows_its_state(self) -> None:
        assert "turns" in repr(self.world.planner)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestPlannerMachine: Any = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
