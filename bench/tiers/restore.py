"""How long a prefix takes to be resident again, from DRAM and from NVMe, and to be computed again, against its length.

One session at a time, all of it in the one tier and nothing of it above, nothing else running. Beside it what the
devices do by themselves: one thread's copy of memory, and reading the same disk in the same pieces.
"""

from __future__ import annotations

import gc
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine
from bench import nvme as disk
from bench.tiers.rig import opened
from bench.tiers.sessions import Texts
from kvstore.types import Tier

if TYPE_CHECKING:
    from bench.tiers.rig import Model, Rig

TIERS = ("dram", "nvme")
RAW_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What to measure."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Tokens of the prefixes."""
    rounds: int = 5
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return len(self.lengths) * self.rounds


@dataclass(slots=True)
class Point:
    """One length; an entry per round. A tier that declined has fewer."""

    tokens: int
    bytes: int = 0
    """Of its slots."""
    recompute_seconds: list[float] = field(default_factory=list)
    restore_seconds: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    ttft_seconds: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    """Of a next turn that had to wait for it; over HTTP only."""
    declined: dict[str, int] = field(default_factory=dict)
    """Wakes that did not bring what slept, by the reason the server gave; over HTTP only."""


@dataclass(slots=True)
class RestoreSamples:
    """All lengths. `raw` has bytes per second of the devices themselves, an entry per round."""

    plan: RestorePlan
    title: str
    points: list[Point] = field(default_factory=list)
    raw: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


async def measure(
    model: Model, plan: RestorePlan, done: Callable[[str], None], place: Path | None = None
) -> RestoreSamples:
    """Every length, `rounds` times.

    Raises:
        BenchFailed: a length is shorter than a block, or a round did not move all of it.
    """
    texts, layout = Texts(model, plan.seed), model.layout
    blocks = layout.blocks_for(max(plan.lengths))
    samples = RestoreSamples(plan, "in this process")
    async with opened(model, hbm_slots=blocks + 1, dram_slots=blocks, nvme_slots=blocks, place=place) as rig:
        assert rig.tier is not None
        samples.notes.append(f"NVMe read with {rig.tier.disk.store.io} IO, checksums verified")
        for tokens in plan.lengths:
            point = Point(tokens)
            samples.points.append(point)
            for number in range(-1, plan.rounds):
                # The first round touches pages of slab and files, and is not counted.
                await _round(rig, point, texts.draw(tokens), is_counted=number >= 0)
                if number >= 0:
                    done(f"{tokens:,} tokens, round {number + 1}")
    samples.raw = raw_rates(place)
    return samples


async def _round(rig: Rig, point: Point, prompt: array[int], *, is_counted: bool) -> None:
    rig.manager.flush()
    gc.collect()
    turn = await rig.turn(prompt, 0)
    await rig.settle()
    keys = rig.keys(turn.token_ids)
    point.bytes = len(keys) * rig.model.layout.slot_bytes
    if is_counted:
        point.recompute_seconds.append(turn.seconds)
    for tier in TIERS:
        await rig.sleep(keys, Tier[tier.upper()])
        seconds = await rig.wake(keys)
        if is_counted:
            point.restore_seconds[tier].append(seconds)


def raw_rates(place: Path | None) -> dict[str, list[float]]:
    """What memory and the disk under `place` do by themselves, where that can be asked."""
    copy = machine.copy_rates()
    directory = (place or Path(tempfile.gettempdir())).resolve()
    samples = disk.measure(disk.NvmePlan(rounds=RAW_ROUNDS), directory, lambda _: None)
    read = samples.fio or samples.read.get("direct") or samples.read.get("buffered", [])
    return {"dram": copy, "nvme": read}
