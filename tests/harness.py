"""The store, the engine and the real model without HTTP: what golden tests drive."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from app import disk_tier
from app.keeper import Keeper, written
from app.settings import Settings
from kvstore import chain
from kvstore.events import WritePolicy
from kvstore.history import History, Seam, text_digests
from kvstore.manager import TierManager
from kvstore.planner import Planner, PlannerConfig
from kvstore.sessions import SessionBook
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.hbm import hbm_store
from kvstore.tiers.nvme import stride_bytes
from kvstore.transfer import Transfers
from kvstore.types import Namespace, StopReason, Tier, TurnId, TurnSpec
from kvstore.workers import Workers
from models.engine import Engine
from models.runner import Runner
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from app.disk_tier import DiskTier
    from kvstore.lease import Grant, Lease
    from kvstore.nvme_dir import NvmeDirectory
    from kvstore.session import OpenTurn
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
    """Manager and engine over one runner; `steps` keeps every report.

    With an NVMe directory, the turns of a `session` are recorded there, and their blocks are found by the next bench.
    """

    manager: TierManager
    engine: WatchedEngine
    runner: Runner
    tier: DiskTier | None = None
    keeper: Keeper | None = None
    steps: list[StepReport] = field(default_factory=list)

    async def turn(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        session: str | None = None,
        cache: bool = True,
        priority: int = 0,
        lesson: Lesson | None = None,
        **params: object,
    ) -> Outcome:
        """Run one turn to its end; greedy unless `params` say otherwise."""
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **params}
        sampling = SamplingParams(**options) if lesson is None else Taught(**options, lesson=lesson)
        ids = array("I", prompt)
        place = None
        if self.keeper is not None and session is not None:
            await self.keeper.recall("", session)
            place = self.keeper.begin("", session, ids)
        spec = TurnSpec(ids, max_new_tokens, SPACE, sampling, priority=priority, cache=cache, to_nvme=place is not None)
        lease = await self.manager.acquire(spec)
        text, stopped, kept = "", StopReason.FAILED, 0
        try:
            async for piece in lease.pieces():
                text += piece.text
                if piece.stopped is not None:
                    assert piece.error is None, piece.error
                    stopped, kept = piece.stopped, piece.kept_tokens
            if self.keeper is not None and place is not None:
                self._record(self.keeper, place, lease, len(prompt))
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

    def _record(self, keeper: Keeper, place: OpenTurn, lease: Lease, first_answer: int) -> None:
        ids = array("I", lease.token_ids)
        text = " ".join(map(str, ids))
        ends = (Seam(len(text), len(ids)),)
        told = History(ids, text, ends, first_answer, ends, text_digests(text, [len(text)]))
        cached = lease.grant.cached_tokens + lease.stored_tokens
        block_tokens = self.runner.layout.block_tokens
        keeper.record(place, told, written(ids, block_tokens, SPACE, computed_tokens=cached, history_tokens=len(ids)))

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


def disk_tier_in(root: Path, loaded: LoadedModel, num_slots: int) -> tuple[NvmeDirectory, DiskTier]:
    """The tier as a server opens it, with what an earlier bench left in `root`."""
    settings = Settings(
        nvme_dir=root, nvme_bytes=num_slots * stride_bytes(loaded.layout.slot_bytes), nvme_free_share=0.0
    )
    directory = disk_tier.take(settings)
    assert directory is not None
    tier = disk_tier.open_tier(settings, directory, loaded, lambda: None)
    assert tier is not None
    assert tier.num_slots == num_slots
    return directory, tier


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
    nvme_dir: Path | None = None,
    nvme_slots: int = 0,
    ring_slots: int = 8,
    nvme_write_policy: WritePolicy = WritePolicy.EVERY_TURN,
    idle_to_nvme_seconds: float = 60.0,
    drain_seconds: float = 0.0,
    exact: bool = True,
    store: Callable[[SlotStore], SlotStore] = lambda store: store,
    wake_deadline_seconds: float = 60.0,
) -> AsyncIterator[Bench]:
    """A running store and engine over `loaded`; checked to be idle and lawful at the end.

    `nvme_slots` in `nvme_dir` are a real tier: what an earlier bench left there is taken over. At the end, what is not
    on NVMe and should be is written for `drain_seconds`.
    """
    block_tokens = loaded.layout.block_tokens
    async with AsyncExitStack() as closing:
        runner = Runner(loaded.model, loaded.layout, hbm_slots, exact=exact)
        slab = DramSlab(dram_slots, loaded.layout.slot_bytes, num_ring=ring_slots if nvme_slots else 0)
        slab.open()
        closing.callback(slab.close)
        stores = {Tier.HBM: store(hbm_store(runner.arena, slab.slot_bytes))}
        workers = {Tier.DRAM: Workers("dram-copy", 1)}
        tier = None
        if nvme_slots:
            assert nvme_dir is not None, "blocks on NVMe lie in a directory"
            directory, tier = disk_tier_in(nvme_dir, loaded, nvme_slots)
            closing.callback(directory.close)
            closing.push_async_callback(tier.close)
            stores[Tier.NVME] = tier.disk.store
            workers[Tier.NVME] = Workers("nvme-io", 4, reserved=1)
        transfers = Transfers(slab, stores, workers)
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
                nvme_slots=nvme_slots,
                ring_slots=ring_slots if nvme_slots else 0,
                slot_bytes=loaded.layout.slot_bytes,
                nvme_write_policy=nvme_write_policy,
                idle_to_nvme_seconds=idle_to_nvme_seconds,
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
        journal = None if tier is None else tier.disk.blocks
        manager = TierManager(planner, engine, max_context=context, mover=transfers, journal=journal, prober=tier)
        it = Bench(manager, engine, runner, tier)
        if tier is not None:
            it.keeper = Keeper(SessionBook(max_sessions=1000, max_branches=16), manager, journal=tier.journal)
            manager.take_over(tier.found, tier.owners)
            it.keeper.restore(tier.restored)
        engine.open()
        try:
            yield it
            await it.until(lambda snapshot: snapshot.transfers == 0)
            it.check_idle()
        finally:
            await manager.drain(drain_seconds)
            if it.keeper is not None:
                it.keeper.close()
            await transfers.close(5.0)
            engine.close()
