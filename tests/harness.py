"""The store, the engine and the real model without HTTP: what golden tests drive."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from kvstore import chain
from kvstore.manager import TierManager
from kvstore.planner import Planner, PlannerConfig
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.hbm import hbm_store
from kvstore.transfer import Transfers
from kvstore.types import Namespace, StopReason, Tier, TurnId, TurnSpec
from kvstore.workers import Workers
from models.engine import Engine
from models.runner import Runner
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvstore.lease import Grant
    from kvstore.snapshot import Snapshot
    from kvstore.tiers.base import SlotStore
    from kvstore.types import StepReport
    from models.loader import LoadedModel

CHECKED_STEPS = 4
"""The laws are checked after every so many steps: a check is linear in the blocks of every tier."""

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
    restored: list[int]
    """Digests of the cached blocks it began, or last resumed, with."""


@dataclass(slots=True)
class Lesson:
    """Notes the logits of every token of one turn; with `ids`, those are what it says, whatever it would have said."""

    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def differs_from(self, other: Lesson) -> float:
        """The largest difference between any two logits that belong together."""
        pairs = zip(self.logits, other.logits, strict=True)
        return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


@dataclass(frozen=True, kw_only=True)
class Taught(SamplingParams):
    """Parameters of a turn that is listened to."""

    lesson: Lesson


class WatchedEngine(Engine):
    """Takes a digest of each cached block's K/V as a turn starts or resumes with it: restored bits, as attended to.

    Listens to turns that are `Taught`.
    """

    def __init__(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        super().__init__(runner, *args, **kwargs)
        self.restored: dict[TurnId, list[int]] = {}

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        self._watch(turn, cached_tokens, slots)
        super().start(turn, spec, cached_tokens, slots)

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        self._watch(turn, cached_tokens, slots)
        super().resume(turn, cached_tokens, slots)

    def _publish(self, plan: Any, chunks: Any, logits: Tensor, report: StepReport) -> None:
        sampled = [answer for (answer, _), chunk in zip(plan, chunks, strict=True) if chunk.wants_logits]
        said = logits.clone()
        for row, answer in enumerate(sampled):
            if isinstance(answer.params, Taught):
                lesson = answer.params.lesson
                lesson.logits.append(logits[row].clone())
                if lesson.ids:
                    said[row, lesson.ids[answer.num_output]] = torch.inf
        super()._publish(plan, chunks, said, report)

    def _watch(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        cached = slots[: cached_tokens // self._runner.layout.block_tokens]
        self.restored[turn] = [_digest(self._runner.arena.slot(slot)) for slot in cached]


def _digest(slot: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(slot.view(torch.uint8).numpy().tobytes())


@dataclass
class Bench:
    """Manager and engine over one runner; `steps` keeps every report."""

    manager: TierManager
    engine: WatchedEngine
    runner: Runner
    steps: list[StepReport] = field(default_factory=list)

    async def turn(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        cache: bool = True,
        priority: int = 0,
        lesson: Lesson | None = None,
        **params: object,
    ) -> Outcome:
        """Run one turn to its end; greedy unless `params` say otherwise."""
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **params}
        sampling = SamplingParams(**options) if lesson is None else Taught(**options, lesson=lesson)
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
        return Outcome(
            lease.grant,
            lease.token_ids,
            list(lease.token_ids[len(prompt) :]),
            text,
            stopped,
            kept,
            self.engine.restored.pop(lease.turn),
        )

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
    dram_slots: int = 0,
    exact: bool = True,
    store: Callable[[SlotStore], SlotStore] = lambda store: store,
    wake_deadline_seconds: float = 60.0,
) -> AsyncIterator[Bench]:
    """A running store and engine over `loaded`; checked to be idle and lawful at the end."""
    block_tokens = loaded.layout.block_tokens
    runner = Runner(loaded.model, loaded.layout, hbm_slots, exact=exact)
    slab = DramSlab(dram_slots, loaded.layout.slot_bytes)
    slab.open()
    stores = {Tier.HBM: store(hbm_store(runner.arena, slab.slot_bytes))}
    transfers = Transfers(slab, stores, {Tier.DRAM: Workers("dram-copy", 1)})
    planner = Planner(
        PlannerConfig(
            cost_gate="off",
            hbm_slots=hbm_slots,
            block_tokens=block_tokens,
            max_running=max_running,
            max_queue=max_queue,
            age_limit_seconds=age_limit_seconds,
            output_slice_tokens=output_slice_tokens,
            dram_slots=dram_slots,
            ring_slots=0,
            wake_deadline_seconds=wake_deadline_seconds,
            demote_deadline_seconds=wake_deadline_seconds,
        )
    )
    context = min(max_context or loaded.max_positions, hbm_slots * block_tokens)
    loop = asyncio.get_running_loop()

    def on_step(report: StepReport) -> None:
        loop.call_soon_threadsafe(deliver, report)

    def deliver(report: StepReport) -> None:
        it.steps.append(report)
        manager.step_ended(report)
        if len(it.steps) % CHECKED_STEPS == 0:
            manager.check()

    engine = WatchedEngine(
        runner,
        loaded.tokenizer.backend_tokenizer,
        loaded.eos_ids,
        max_context=context,
        prefill_chunk_tokens=prefill_chunk_tokens,
        on_step=on_step,
    )
    manager = TierManager(planner, engine, max_context=context, mover=transfers)
    it = Bench(manager, engine, runner)
    engine.open()
    try:
        yield it
        await it.until(lambda snapshot: snapshot.transfers == 0)
        it.check_idle()
    finally:
        await manager.drain(0.0)
        await transfers.close(5.0)
        engine.close()
        slab.close()
