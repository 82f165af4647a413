"""Many long sessions on little HBM: each answers once, then, in random order, each is gone on with once.

One turn at a time. HBM holds a few of the sessions, DRAM some more and NVMe all of them, so when the last one has
answered nearly all sleep. A session resumes whole if only its tail is computed again: what is past its last full block.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.tiers.rig import opened
from bench.tiers.sessions import QUESTION_TOKENS, Continuation, Shape, Texts, continuation

if TYPE_CHECKING:
    from bench.tiers.rig import Model


@dataclass(frozen=True, slots=True)
class LongPlan:
    """What to measure."""

    sessions: int = 120
    tokens: int = 4096
    """Of each first prompt."""
    hbm_sessions: int = 8
    """That HBM holds, whole."""
    dram_sessions: int = 30
    """That DRAM holds; where these are all, there is no NVMe."""
    answer_tokens: int = 16
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return 2 * self.sessions

    @property
    def nvme_sessions(self) -> int:
        return self.sessions if self.dram_sessions < self.sessions else 0


@dataclass(slots=True)
class LongSamples:
    """An entry per session."""

    plan: LongPlan
    hbm_slots: int
    dram_slots: int
    nvme_slots: int
    slot_bytes: int
    cold_ttft_seconds: list[float] = field(default_factory=list)
    resumed: list[Continuation] = field(default_factory=list)
    first_seconds: float = 0.0
    """Of all first turns."""
    resumed_seconds: float = 0.0
    totals: dict[str, int] = field(default_factory=dict)
    """What the store counted (kvstore.snapshot.Totals)."""

    @property
    def num_whole(self) -> int:
        return sum(each.is_whole for each in self.resumed)


async def measure(model: Model, plan: LongPlan, done: Callable[[str], None], place: Path | None = None) -> LongSamples:
    """First turns, then one more of each.

    Raises:
        BenchFailed: a turn was refused or failed, or this machine has not that much memory or disk.
    """
    texts, block = Texts(model, plan.seed), model.layout.block_tokens
    blocks = Shape(plan.tokens, 2, plan.answer_tokens).blocks(block)
    held = (each * blocks for each in (plan.hbm_sessions, min(plan.dram_sessions, plan.sessions), plan.nvme_sessions))
    hbm_slots, dram_slots, nvme_slots = held
    samples = LongSamples(plan, hbm_slots, dram_slots, nvme_slots, model.layout.slot_bytes)
    slots = {"dram_slots": samples.dram_slots, "nvme_slots": samples.nvme_slots}
    async with opened(model, hbm_slots=samples.hbm_slots, **slots, place=place) as rig:
        turns, started = [], time.perf_counter()
        for number in range(plan.sessions):
            turn = await rig.turn(texts.draw(plan.tokens), plan.answer_tokens)
            samples.cold_ttft_seconds.append(turn.ttft_seconds)
            turns.append(turn)
            done(f"first turn {number + 1} of {plan.sessions}")
        samples.first_seconds = time.perf_counter() - started
        random.Random(plan.seed).shuffle(turns)
        started = time.perf_counter()
        for before in turns:
            prompt = before.token_ids + texts.draw(QUESTION_TOKENS)
            turn = await rig.turn(prompt, plan.answer_tokens, after=before)
            samples.resumed.append(continuation(len(before.token_ids), turn, block))
            done(f"{samples.num_whole} of {len(samples.resumed)} resumed whole")
        samples.resumed_seconds = time.perf_counter() - started
        samples.totals = asdict(rig.manager.snapshot().totals)
    return samples
