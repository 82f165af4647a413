"""What decoding loses while other sessions are copied.

One stream answers the same prompt again and again, a window each time, so that all windows decode at the same
positions. Windows alternate: in every second one other sessions fall asleep and wake in a loop, at a given pace or as
fast as they can. DRAM has room for one of them, so each sleep is a copy out of HBM that takes the place of the last
one's, and each wake a copy back: twice the copies of a server that only puts sessions to sleep. As fast as they can
is more than any server comes to, whose sessions must be computed before they sleep; it is what the memory can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.errors import BenchFailed
from bench.stats import Ratio, p95_ratio
from bench.tiers.rig import opened
from bench.tiers.sessions import Texts
from kvstore.types import Tier

if TYPE_CHECKING:
    from bench.steps import Window
    from bench.tiers.rig import Model, Rig
    from kvstore.types import BlockKey

GOAL = 1.10
"""p95 of a step with copies over p95 without; the project's own bar."""

BOUND = 1.15
"""For the upper end of the ratio's interval."""

OTHERS = 3
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What to measure."""

    tokens: int = 2000
    """Decoded in all, at least."""
    window_tokens: int = 100
    prompt_tokens: int = 512
    other_tokens: int = 1024
    """Of each session that is copied."""
    sleeps_per_second: int = 0
    """Of sessions; 0 is as fast as they can."""
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        """Pairs of windows."""
        return -(-self.tokens // (2 * self.window_tokens))


@dataclass(slots=True)
class DecodeSamples:
    """Windows of both kinds; those of one index are a pair."""

    plan: DecodePlan
    copying: list[Window] = field(default_factory=list)
    quiet: list[Window] = field(default_factory=list)
    bytes_out: list[int] = field(default_factory=list)
    """Copied from HBM to DRAM in each copying window."""
    bytes_in: list[int] = field(default_factory=list)
    sleeps: list[int] = field(default_factory=list)
    """Sessions put to sleep in each copying window."""
    window_seconds: list[float] = field(default_factory=list)
    """Of each copying window's turn, its few tokens of prefill included."""

    def ratio(self) -> Ratio:
        """p95 with copies over p95 without."""
        return p95_ratio(
            [(a.seconds, b.seconds) for a, b in zip(self.copying, self.quiet, strict=True)], self.plan.seed
        )


class Circle:
    """Sessions that fall asleep and wake, one after the other, until they are told to end."""

    def __init__(self, rig: Rig, chains: Sequence[tuple[BlockKey, ...]], sleeps_per_second: int) -> None:
        self._rig = rig
        self._chains = chains
        self._interval_seconds = 1 / sleeps_per_second if sleeps_per_second else 0.0
        self._ending = asyncio.Event()
        self.num_sleeps = 0

    async def run(self) -> None:
        """Whoever sleeps is awake again at the end."""
        started = time.perf_counter()
        while not self._ending.is_set():
            chain = self._chains[self.num_sleeps % len(self._chains)]
            await self._rig.sleep(chain)
            self.num_sleeps += 1
            await self._rig.wake(chain)
            await self._pause(started + self.num_sleeps * self._interval_seconds)

    async def _pause(self, until: float) -> None:
        """Sleep until then, or until the circle is to end."""
        seconds = until - time.perf_counter()
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seconds)

    def end(self) -> None:
        self._ending.set()


class DecodeBench:
    """Runs the windows on one rig."""

    def __init__(self, rig: Rig, plan: DecodePlan, prompt: array[int], chains: list[tuple[BlockKey, ...]]) -> None:
        self._rig = rig
        self._prompt = prompt
        self._chains = chains
        self._samples = DecodeSamples(plan)

    async def run(self, done: Callable[[str], None]) -> DecodeSamples:
        """All pairs; which window of a pair comes first alternates."""
        await self._window(WARM_UP_TOKENS)
        await self._copying(WARM_UP_TOKENS, is_warm_up=True)
        tokens = self._samples.plan.window_tokens + 1  # the first comes with the prompt
        for index in range(self._samples.plan.num_rounds):
            if index % 2:
                await self._quiet(tokens)
                await self._copying(tokens)
            else:
                await self._copying(tokens)
                await self._quiet(tokens)
            done(f"pair {index + 1}")
        return self._samples

    async def _quiet(self, tokens: int) -> None:
        before = self._copied()
        self._samples.quiet.append((await self._window(tokens))[0])
        if self._copied() != before:
            raise BenchFailed("blocks were copied in a window that should be quiet")

    async def _copying(self, tokens: int, *, is_warm_up: bool = False) -> None:
        samples, (out, back) = self._samples, self._copied()
        circle = Circle(self._rig, self._chains, samples.plan.sleeps_per_second)
        copies = asyncio.create_task(circle.run())
        try:
            window, seconds = await self._window(tokens)
        finally:
            circle.end()
            await copies
        if is_warm_up:
            return
        bytes_out, bytes_in = self._copied()
        samples.copying.append(window)
        samples.window_seconds.append(seconds)
        samples.bytes_out.append(bytes_out - out)
        samples.bytes_in.append(bytes_in - back)
        samples.sleeps.append(circle.num_sleeps)
        if bytes_out == out:
            raise BenchFailed("nothing was copied in a window in which sessions should fall asleep")

    async def _window(self, tokens: int) -> tuple[Window, float]:
        gc.collect()
        self._rig.log.clear()
        turn = await self._rig.turn(self._prompt, tokens)
        return self._rig.log.take(1), turn.seconds

    def _copied(self) -> tuple[int, int]:
        return self._rig.copied_bytes(Tier.HBM, Tier.DRAM), self._rig.copied_bytes(Tier.DRAM, Tier.HBM)


async def measure(model: Model, plan: DecodePlan, done: Callable[[str], None]) -> DecodeSamples:
    """Compute the other sessions, then run the windows.

    Raises:
        BenchFailed: a copy failed or came late, or a quiet window was not quiet.
    """
    texts = Texts(model, plan.seed)
    blocks_for = model.layout.blocks_for
    other = blocks_for(plan.other_tokens)
    stream = blocks_for(plan.prompt_tokens + plan.window_tokens + 1) + 1
    # Twice what they need: far from the watermarks, so that the store copies nothing by itself.
    async with opened(model, hbm_slots=2 * (OTHERS * other + stream), dram_slots=other) as rig:
        chains = []
        for _ in range(OTHERS):
            history = texts.draw(plan.other_tokens)
            await rig.turn(history, 0)
            chains.append(rig.keys(history))
        prompt = texts.draw(plan.prompt_tokens)
        await rig.turn(prompt, 0)
        await rig.settle()
        return await DecodeBench(rig, plan, prompt, chains).run(done)
