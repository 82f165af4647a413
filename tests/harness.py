"""The store, the engine and the real model without HTTP: what golden tests drive."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore import chain
from kvstore.manager import TierManager
from kvstore.planner import Planner, PlannerConfig
from kvstore.types import Namespace, StopReason, TurnSpec
from models.engine import Engine
from models.runner import Runner
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvstore.lease import Grant
    from kvstore.snapshot import Snapshot
    from kvstore.types import StepReport
    from models.loader import LoadedModel

SPACE: Namespace = chain.namespace(b"tests", "", None)


@dataclass(slots=True)
class Outcome:
    """One finished turn."""

    grant: Grant
    token_ids: array[int]
    """Prompt and output."""
    output_ids: list[int]
    text: str
    stopped: StopReason
    kept_tokens: int


@dataclass
class Bench:
    """Manager and engine over one runner; `steps` keeps every report."""

    manager: TierManager
    engine: Engine
    runner: Runner
    steps: list[StepReport] = field(default_factory=list)

    async def turn(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        cache: bool = True,
        priority: int = 0,
        **params: object,
    ) -> Outcome:
        """Run one turn to its end; greedy unless `params` say otherwise."""
        sampling = SamplingParams(**{"temperature": 0.0, "max_new_tokens": max_new_tokens, **params})  # type: ignore[arg-type]
        spec = TurnSpec(array("I", prompt), max_new_tokens, SPACE, sampling, priority=priority, cache=cache)
        lease = await self.manager.acquire(spec)
        text, stopped, kept = "", StopReason.FAILED, 0
        try:
            async for piece in lease.pieces():
                text += piece.text
                if piece.stopped is not None:
                    assert piece.error is None, piece.error
                    stopped, kept = piece.stopped, piece.kept_tokens
        finally:
            await lease.close()
        return Outcome(lease.grant, lease.token_ids, list(lease.token_ids[len(prompt) :]), text, stopped, kept)

    async def until(self, reached: Callable[[Snapshot], bool]) -> None:
        """Let the loop run until the store's counters satisfy `reached`."""
        while not reached(self.manager.snapshot()):  # noqa: ASYNC110 - no event exists for every counter
            await asyncio.sleep(0.001)

    def check_idle(self) -> None:
        """All laws hold and nothing is held by anyone."""
        self.manager.check()
        snapshot = self.manager.snapshot()
        assert snapshot.turns.granted == snapshot.turns.waiting == snapshot.turns.suspended == 0
        for tier in snapshot.tiers:
            assert tier.pinned == tier.open == tier.filling == tier.quarantined == 0


@asynccontextmanager
async def bench(
    loaded: LoadedModel,
    *,
    hbm_slots: int,
    max_running: int = 64,
    max_queue: int = 1024,
    max_context: int | None = None,
    prefill_chunk_tokens: int = 512,
    age_limit_seconds: float = 10.0,
    output_slice_tokens: int = 64,
) -> AsyncIterator[Bench]:
    """A running store and engine over `loaded`; checked to be idle and lawful at the end."""
    block_tokens = loaded.layout.block_tokens
    runner = Runner(loaded.model, loaded.layout, hbm_slots)
    planner = Planner(
        PlannerConfig(
            hbm_slots=hbm_slots,
            block_tokens=block_tokens,
            max_running=max_running,
            max_queue=max_queue,
            age_limit_seconds=age_limit_seconds,
            output_slice_tokens=output_slice_tokens,
        )
    )
    context = min(max_context or loaded.max_positions, hbm_slots * block_tokens)
    loop = asyncio.get_running_loop()

    def on_step(report: StepReport) -> None:
        loop.call_soon_threadsafe(deliver, report)

    def deliver(report: StepReport) -> None:
        it.steps.append(report)
        manager.step_ended(report)
        manager.check()

    engine = Engine(
        runner,
        loaded.tokenizer.backend_tokenizer,
        loaded.eos_ids,
        max_context=context,
        prefill_chunk_tokens=prefill_chunk_tokens,
        on_step=on_step,
    )
    manager = TierManager(planner, engine, max_context=context)
    it = Bench(manager, engine, runner)
    engine.open()
    try:
        yield it
        it.check_idle()
    finally:
        await manager.drain(0.0)
        engine.close()
