"""The store and the engine that `dormouse serve` runs, without HTTP, with budgets in slots.

Put together by the same functions as the server (app.startup), with the same limits and deadlines: what is late there
is late here. The model is loaded once, arena, slab and NVMe's files are made anew for each measurement. The catalog of
sessions has none of them: only the store is told where branches end, as it must be to write them to NVMe.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app import disk_tier, sizes, startup
from bench.errors import BenchFailed
from bench.steps import StepLog
from kvstore import chain
from kvstore.errors import Refusal, SettingInvalid
from kvstore.events import BranchRecorded, WakeStatus
from kvstore.tiers.nvme import stride_bytes
from kvstore.types import Tier, TurnSpec
from models.runner import Runner
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from app.disk_tier import DiskTier
    from app.settings import Settings
    from kvstore.lease import Grant
    from kvstore.manager import TierManager
    from kvstore.tiers.dram import DramSlab
    from kvstore.transfer import Transfers
    from kvstore.types import BlockKey, KVLayout, StepReport
    from models.loader import LoadedModel

LOADING_BYTES = 256 * 1024**2
"""Of the arena that only loading the model needs, which is thrown away."""

HOLD_SECONDS = 30.0
"""Of every wake: what a client that names nothing else gets."""

POLL_SECONDS = 0.001
MOST_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Model:
    """What all measurements share."""

    settings: Settings
    loaded: LoadedModel
    is_exact: bool
    attention: str
    """Which path was chosen, and why."""

    @property
    def layout(self) -> KVLayout:
        return self.loaded.layout


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn. TTFT counts from asking the store to the first token, or to the end where there is none."""

    token_ids: array[int]
    """Prompt and output."""
    grant: Grant
    ttft_seconds: float
    seconds: float
    tip: BlockKey | None = None
    """Of what the store has of it now."""

    @property
    def prefill_seconds(self) -> float:
        """Of TTFT, what was neither queue nor wake."""
        return self.ttft_seconds - self.grant.queue_seconds - self.grant.wake_seconds


def load(settings: Settings) -> Model:
    """Fetch, check and load the model; blocking.

    Raises:
        SettingInvalid, ModelError: as for the server.
    """
    small = settings.model_copy(update={"hbm_bytes": LOADING_BYTES, "dram_bytes": 0, "max_context": "auto"})
    machinery = startup.load(small)
    return Model(settings, machinery.model, machinery.runner.exact, machinery.attention)


class Rig:
    """A running store and engine."""

    def __init__(
        self,
        model: Model,
        manager: TierManager,
        transfers: Transfers,
        slab: DramSlab,
        log: StepLog,
        tier: DiskTier | None = None,
    ) -> None:
        self.model = model
        self.manager = manager
        self.transfers = transfers
        self.slab = slab
        self.log = log
        self.tier = tier
        self._space = chain.namespace(model.loaded.model_key, "bench", None)

    def keys(self, token_ids: array[int]) -> tuple[BlockKey, ...]:
        """Of the full blocks of `token_ids`, in order."""
        return tuple(chain.extend(None, token_ids, self.model.layout.block_tokens, self._space))

    async def turn(self, prompt: Sequence[int], new_tokens: int, after: Turn | None = None) -> Turn:
        """Compute `prompt` and answer with exactly `new_tokens`, greedy; 0 only stores the prompt.

        `after` is the turn that it goes on from: its branch moves.

        Raises:
            BenchFailed: the store refused the turn, the engine failed, or the answer is shorter.
        """
        params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
        started = time.perf_counter()
        first = 0.0
        try:
            spec = TurnSpec(array("I", prompt), new_tokens, self._space, params, to_nvme=self.tier is not None)
            lease = await self.manager.acquire(spec)
        except Refusal as exc:
            raise BenchFailed(f"a turn of {len(prompt)} tokens was refused: {exc}") from exc
        try:
            async for piece in lease.pieces():
                if piece.error is not None:
                    raise BenchFailed(f"the engine failed: {piece.error}")
                if piece.new_token_ids and not first:
                    first = time.perf_counter()
            ended = time.perf_counter()
        finally:
            await lease.close()
        stored = (lease.grant.cached_tokens + lease.stored_tokens) // self.model.layout.block_tokens
        keys = self.keys(lease.token_ids)[:stored]
        tip = keys[-1] if keys else None
        if self.tier is not None:
            self.manager.record_branch(BranchRecorded(tip, None if after is None else after.tip))
        if len(lease.token_ids) != len(prompt) + new_tokens:
            raise BenchFailed(f"an answer has {len(lease.token_ids) - len(prompt)} tokens instead of {new_tokens}")
        return Turn(lease.token_ids, lease.grant, (first or ended) - started, ended - started, tip)

    async def sleep(self, keys: Sequence[BlockKey], target: Tier = Tier.DRAM) -> None:
        """Put a chain to sleep.

        Raises:
            BenchFailed: not all of it is in `target` now, or some still above.
        """
        await self.manager.sleep(keys, target)
        where = self.manager.blocks_by_tier(keys)
        above = sum(count for tier, count in where.items() if tier < target)
        if above or where[target] != len(keys):
            raise BenchFailed(f"of {len(keys)} blocks {where[target]} are in {target.name} and {above} above it")

    async def wake(self, keys: Sequence[BlockKey]) -> float:
        """Bring a chain to HBM; the seconds from asking to being told that all of it is there.

        Raises:
            BenchFailed: less came, or none.
        """
        started = time.perf_counter()
        pending = self.manager.wake(keys, Tier.HBM, HOLD_SECONDS)
        await pending.settled()
        seconds = time.perf_counter() - started
        wanted = len(keys) * self.model.layout.block_tokens
        if pending.status is not WakeStatus.AWAKE or pending.tokens != wanted:
            raise BenchFailed(f"a wake ended as {pending.status.value} with {pending.tokens} of {wanted} tokens")
        return seconds

    async def settle(self) -> None:
        """Wait until no block is on its way."""
        while self.manager.snapshot().transfers:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(POLL_SECONDS)

    def copied_bytes(self, source: Tier, target: Tier) -> int:
        """That transfers have brought from `source` to `target` so far."""
        traffic = self.transfers.traffic.get((source, target))
        return traffic.bytes if traffic is not None else 0


@asynccontextmanager
async def opened(
    model: Model, *, hbm_slots: int, dram_slots: int, nvme_slots: int = 0, place: Path | None = None
) -> AsyncIterator[Rig]:
    """A rig with these budgets and nothing in it; at the end all laws of the store are checked.

    NVMe's files lie in a temporary folder in `place`, by default where temporary files are.

    Raises:
        BenchFailed: the machine has not that much memory, or the disk not that much room.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-tiers-", dir=place))
        model = replace(model, settings=_with_nvme(model, nvme_slots, Path(folder)))
        async with _running(model, hbm_slots, dram_slots, nvme_slots) as rig:
            yield rig


def _with_nvme(model: Model, nvme_slots: int, folder: Path) -> Settings:
    """A budget for exactly so many slots, whatever a day's writing would wear out."""
    budget = nvme_slots * stride_bytes(model.layout.slot_bytes)
    tier = {"nvme_bytes": budget, "nvme_dir": folder, "nvme_free_share": 0.0, "nvme_rated_bytes_per_day": MOST_BYTES}
    return model.settings.model_copy(update=tier)


@asynccontextmanager
async def _running(model: Model, hbm_slots: int, dram_slots: int, nvme_slots: int) -> AsyncIterator[Rig]:
    loop = asyncio.get_running_loop()
    log = StepLog()
    machinery = _machinery(model, hbm_slots, dram_slots, has_nvme=nvme_slots > 0)

    def on_step(report: StepReport) -> None:
        loop.call_soon_threadsafe(deliver, report)

    def deliver(report: StepReport) -> None:
        log.note(report)
        manager.step_ended(report)

    tier = await _tier(model, machinery, nvme_slots)
    machinery.slab.open()
    engine = startup.make_engine(model.settings, machinery, on_step)
    transfers = startup.make_transfers(model.settings, machinery, machinery.slab, engine, tier)
    manager = startup.make_manager(model.settings, machinery, engine, transfers, tier)
    rig = Rig(model, manager, transfers, machinery.slab, log, tier)
    engine.open()
    try:
        yield rig
        await rig.settle()
        manager.check()
    finally:
        await manager.drain(0.0)
        copies_ended = await transfers.close(startup.COPIES_END_SECONDS)
        await asyncio.to_thread(engine.close)
        if copies_ended:
            machinery.slab.close()
        if tier is not None:
            await tier.close()


async def _tier(model: Model, machinery: startup.Machinery, nvme_slots: int) -> DiskTier | None:
    try:
        directory = await asyncio.to_thread(disk_tier.take, model.settings)
        tier = await startup.tier_of(model.settings, directory, machinery, lambda: None)
    except SettingInvalid as exc:
        raise BenchFailed(f"NVMe for so many sessions cannot be had here ({exc})") from exc
    if tier is not None and tier.num_slots < nvme_slots:
        await tier.close()
        raise BenchFailed(f"the disk has room for {tier.num_slots} of {nvme_slots} blocks")
    return tier


def _machinery(model: Model, hbm_slots: int, dram_slots: int, *, has_nvme: bool) -> startup.Machinery:
    loaded, layout = model.loaded, model.layout
    budgets = {"hbm_bytes": hbm_slots * layout.slot_bytes, "dram_bytes": dram_slots * layout.slot_bytes}
    try:
        planned = sizes.plan(
            model.settings.model_copy(update={**budgets, "max_context": "auto"}),
            layout,
            startup.memory_of(loaded.device),
            host=sizes.host_memory(),
            on_cpu=loaded.device.type == "cpu",
            weights_bytes=0,
            model_context=loaded.max_positions,
        )
    except SettingInvalid as exc:
        raise BenchFailed(f"so much cannot be measured here; fewer or shorter sessions can ({exc})") from exc
    runner = Runner(loaded.model, layout, planned.hbm_slots, exact=model.is_exact)
    ring_slots = sizes.RING_SLOTS if has_nvme else 0
    slab = startup.make_slab(planned.dram_slots, layout.slot_bytes, loaded.device, ring_slots)
    return startup.Machinery(loaded, runner, slab, planned, model.attention)
