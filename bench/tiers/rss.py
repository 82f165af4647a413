"""Resident memory and DRAM's slots over many cycles of sleep and wake.

A few short sessions in turn, on a DRAM that holds half of them: each sleep copies out of HBM and takes the place of a
copy that is in HBM as well. Every transfer into DRAM is looked at as it starts: how full that makes DRAM, and which
slots it writes to.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import psutil

from bench.errors import BenchFailed
from bench.tiers.rig import opened
from bench.tiers.sessions import Texts
from kvstore.types import Tier

if TYPE_CHECKING:
    from bench.tiers.rig import Model, Rig
    from kvstore.events import StartTransfer, TransferDone

SESSIONS = 8
SAMPLES = 200
SETTLED_SHARE = 0.1
"""Of the cycles: pages of slabs, stacks and allocators have been touched by then."""

FLAT_SHARE = 0.01
"""Growth after that, as a share of RSS, that is still called flat; this benchmark's own bar."""


@dataclass(frozen=True, slots=True)
class RssPlan:
    """What to measure."""

    cycles: int = 2000
    blocks: int = 4
    """Of each session."""
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return len(self.sampled_at)

    @property
    def sampled_at(self) -> list[int]:
        """Cycles after which RSS is read."""
        return sorted({round(share * self.cycles) for share in np.linspace(0, 1, SAMPLES + 1)[1:]} - {0})


@dataclass(slots=True)
class RssSamples:
    """RSS in bytes; the first entry is from before the first cycle."""

    plan: RssPlan
    cycles: list[int] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    sleeps: int = 0
    wakes: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    dram_slots: int = 0
    peak_dram_slots: int = 0
    """Most in use at once, as the store counts them when a transfer starts."""
    highest_dram_slot: int = -1
    """That a transfer wrote to; slots count from 0."""
    slot_bytes: int = 0
    ring_bytes: int = 0
    """Of the staging ring, which is no part of DRAM's budget."""

    @property
    def settled(self) -> int:
        """Index of the first sample after a tenth of the cycles."""
        return next(index for index, cycle in enumerate(self.cycles) if cycle >= SETTLED_SHARE * self.plan.cycles)

    @property
    def settled_bytes(self) -> int:
        return self.rss_bytes[self.settled]

    @property
    def growth_bytes(self) -> int:
        """From a tenth of the cycles to the end."""
        return self.rss_bytes[-1] - self.settled_bytes

    @property
    def slope_bytes_per_cycle(self) -> float:
        """Of the line through the samples of the same span."""
        cycles, sizes = self.cycles[self.settled :], self.rss_bytes[self.settled :]
        return float(np.polyfit(cycles, sizes, 1)[0]) if len(cycles) > 1 else 0.0

    @property
    def is_flat(self) -> bool:
        return self.growth_bytes <= FLAT_SHARE * self.settled_bytes

    @property
    def stays_within_dram(self) -> bool:
        return self.peak_dram_slots <= self.dram_slots and self.highest_dram_slot < self.dram_slots


async def measure(model: Model, plan: RssPlan, done: Callable[[str], None]) -> RssSamples:
    """Compute the sessions, then run the cycles.

    Raises:
        BenchFailed: a cycle did not move a whole session.
    """
    texts = Texts(model, plan.seed)
    total = SESSIONS * plan.blocks
    async with opened(model, hbm_slots=2 * total, dram_slots=total // 2) as rig:
        chains = []
        for _ in range(SESSIONS):
            history = texts.draw(plan.blocks * model.layout.block_tokens)
            await rig.turn(history, 0)
            chains.append(rig.keys(history))
        await rig.settle()
        slab = rig.slab
        samples = RssSamples(plan, dram_slots=slab.num_slots, slot_bytes=slab.slot_bytes, ring_bytes=slab.ring_bytes)
        _watch(rig, samples)
        gc.collect()
        _read(samples, 0)
        sampled_at, started = set(plan.sampled_at), time.perf_counter()
        for cycle in range(1, plan.cycles + 1):
            chain = chains[cycle % SESSIONS]
            await rig.sleep(chain)
            samples.sleeps += 1
            await rig.wake(chain)
            samples.wakes += 1
            if cycle in sampled_at:
                _read(samples, cycle)
                done(f"cycle {cycle:,}")
        samples.seconds = time.perf_counter() - started
        samples.blocks_out = rig.copied_bytes(Tier.HBM, Tier.DRAM) // slab.slot_bytes
        samples.blocks_in = rig.copied_bytes(Tier.DRAM, Tier.HBM) // slab.slot_bytes
    if samples.blocks_out < plan.cycles * plan.blocks:
        raise BenchFailed(f"only {samples.blocks_out} blocks were copied out in {plan.cycles} cycles")
    return samples


def _read(samples: RssSamples, cycle: int) -> None:
    samples.cycles.append(cycle)
    samples.rss_bytes.append(psutil.Process().memory_info().rss)


def _watch(rig: Rig, samples: RssSamples) -> None:
    """Look at every transfer as it starts; the store looks `start` up each time, so no seam is needed for our sake."""
    carry_out = rig.transfers.start

    def start(action: StartTransfer, done: Callable[[TransferDone], None]) -> None:
        if action.target is Tier.DRAM:
            dram = rig.manager.snapshot().tier(Tier.DRAM)
            samples.peak_dram_slots = max(samples.peak_dram_slots, dram.capacity - dram.free)
            samples.highest_dram_slot = max(samples.highest_dram_slot, *action.target_slots)
        carry_out(action, done)

    setattr(rig.transfers, "start", start)  # noqa: B010 - to a type checker a method is no variable
