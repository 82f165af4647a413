"""How long a sleeping session takes to be resident again, against computing it again.

One session, all of it in DRAM and nothing of it in HBM, nothing else running. A wake is timed from asking the store to
its answer that everything is there, so the event loop's and the copying threads' turns are in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.tiers.rig import opened
from bench.tiers.sessions import Texts

if TYPE_CHECKING:
    from bench.tiers.rig import Model, Rig

GOAL_SECONDS = 0.025
"""p50 for 4,096 tokens of the embedded model on an idle machine; the project's own bar."""

GOAL_TOKENS = 4096
WARM_UP_ROUNDS = 2
"""Not counted: they touch the slab's pages for the first time."""


@dataclass(frozen=True, slots=True)
class WakePlan:
    """What to measure."""

    tokens: int = GOAL_TOKENS
    """Of the session; a partial last block is not stored and not waited for."""
    rounds: int = 50
    recomputes: int = 3
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return self.rounds + self.recomputes


@dataclass(slots=True)
class WakeSamples:
    """An entry per round."""

    plan: WakePlan
    blocks: int
    bytes: int
    """Of its slots."""
    wake_seconds: list[float] = field(default_factory=list)
    recompute_seconds: list[float] = field(default_factory=list)


async def measure(model: Model, plan: WakePlan, done: Callable[[str], None]) -> WakeSamples:
    """Compute the session a few times, then let it sleep and wake.

    Raises:
        BenchFailed: it is shorter than a block, or a round did not move all of it.
    """
    prompt = Texts(model, plan.seed).draw(plan.tokens)
    blocks = model.layout.blocks_for(plan.tokens)
    async with opened(model, hbm_slots=blocks + 1, dram_slots=blocks) as rig:
        keys = rig.keys(prompt)
        samples = WakeSamples(plan, len(keys), len(keys) * model.layout.slot_bytes)
        for number in range(plan.recomputes):
            await _forget_all(rig)
            samples.recompute_seconds.append((await rig.turn(prompt, 0)).seconds)
            done(f"recompute {number + 1}")
        await rig.settle()
        for number in range(-WARM_UP_ROUNDS, plan.rounds):
            await rig.sleep(keys)
            seconds = await rig.wake(keys)
            if number >= 0:
                samples.wake_seconds.append(seconds)
                done(f"wake {number + 1}")
    return samples


async def _forget_all(rig: Rig) -> None:
    await rig.settle()
    rig.manager.flush()
    gc.collect()
