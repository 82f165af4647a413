"""From settings to a running gateway, and back down again.

thread      files, weights, budgets           (blocking: seconds to minutes, told line by line)
loop        planner, manager, engine thread
...         serving
loop        drain: refuse new turns, wait for running ones, cancel what is left
thread      join the engine thread
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from app import disk_tier, probe, sizes
from app.gateway import Gateway
from app.hints import Hints
from app.keeper import Keeper
from app.metrics import Metrics
from app.names import ServedNames
from app.probe import NOT_MEASURED, Pace
from app.traces import open_traces
from kvstore.errors import SettingInvalid
from kvstore.events import WritePolicy
from kvstore.manager import TierManager
from kvstore.planner import Planner, PlannerConfig
from kvstore.reuse import MissReason
from kvstore.sessions import SessionBook
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.hbm import hbm_store
from kvstore.transfer import Transfers
from kvstore.types import KVLayout, LayerKV, Tier
from kvstore.workers import Workers, Yielding
from models import exactness, loader
from models.chat import ChatTemplate
from models.engine import Choose, Engine
from models.grammar import Grammars
from models.runner import Runner
from models.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from app.disk_tier import DiskTier
    from app.settings import Settings
    from app.sizes import Sizes
    from kvstore.nvme_dir import NvmeDirectory
    from kvstore.tiers.base import SlotStore
    from kvstore.tiers.file_io import FileIO
    from kvstore.types import StepReport
    from models.loader import LoadedModel

log = logging.getLogger("dormouse.startup")

COPIES_END_SECONDS = 2.0
"""A copy of one run takes milliseconds; more means that it hangs, and its memory must stay mapped."""

CPU_COPY_SHARE = 0.02
"""A step shares cores and memory with copies there. Sessions are computed before they sleep, at a hundredth of the
rate at which they are copied, so this is never what they wait for (docs/performance.md)."""

TEXT_THREADS = 2
"""Templates hold the GIL and tokenizers do not: more threads would only wait for each other."""


@dataclass(frozen=True, slots=True)
class Machinery:
    """What is loaded before anything runs."""

    model: LoadedModel
    runner: Runner
    slab: DramSlab
    sizes: Sizes
    attention: str  # which path was chosen, and why
    pace: Pace = NOT_MEASURED


@asynccontextmanager
async def opened(settings: Settings, choose: Choose = sample, files: FileIO | None = None) -> AsyncIterator[Gateway]:
    """The gateway, running; at the end it drains for `drain_seconds` at most.

    `choose` is for tests that need the model to say certain words (models/engine.py), `files` for those that need a
    disk to fail. Whatever stops a start-up half-way, what it had taken by then is given back.

    Raises:
        SettingInvalid: model and budgets do not fit, a device is not there, or the NVMe directory cannot be had.
        ModelError: the model cannot be had or would answer wrongly.
    """
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as closing:
        # First, since it may be refused; closed last, when the last turn has been told.
        traces = open_traces(settings)
        closing.push_async_callback(asyncio.to_thread, traces.close)
        directory = await asyncio.to_thread(disk_tier.take, settings)
        if directory is not None:
            closing.callback(directory.close)
        # A thread of its own, gone before the engine's begins: every thread that ran torch keeps an OpenMP team for as
        # long as it lives, and with more of them than cores libgomp stops spinning, which made each step 1.8x slower.
        with ThreadPoolExecutor(1, "load") as loading:
            machinery = await loop.run_in_executor(loading, load, settings)
        unmapping = closing.enter_context(ExitStack())
        unmapping.callback(machinery.slab.close)

        def on_step(report: StepReport) -> None:
            loop.call_soon_threadsafe(manager.step_ended, report)

        def on_lost() -> None:
            loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(gateway.keeper.tell_all())))

        tasks: set[asyncio.Task[None]] = set()
        tier = await tier_of(settings, directory, machinery, on_lost, files)
        if tier is not None:
            closing.push_async_callback(tier.close)
        engine = make_engine(settings, machinery, on_step, choose)
        transfers = make_transfers(settings, machinery, machinery.slab, engine, tier)
        manager = make_manager(settings, machinery, engine, transfers, tier)
        text_threads = closing.enter_context(ThreadPoolExecutor(TEXT_THREADS, "text"))
        gateway = make_gateway(settings, machinery, manager, text_threads, tier)
        gateway.traces = traces
        gateway.metrics.watch_transfers(transfers.traffic)
        gateway.traffic = transfers.traffic
        if tier is not None:
            manager.take_over(tier.found, tier.owners)
            gateway.keeper.restore(tier.restored)
        engine.open()
        try:
            yield gateway
        finally:
            gateway.is_draining = True
            await manager.drain(settings.drain_seconds, _tell_drain)
            gateway.keeper.close()
            for task in tasks:
                task.cancel()
            if not await transfers.close(COPIES_END_SECONDS):
                unmapping.pop_all()  # a copy that hangs may still write there
            await asyncio.to_thread(engine.close)


async def tier_of(
    settings: Settings,
    directory: NvmeDirectory | None,
    machinery: Machinery,
    on_lost: Callable[[], None],
    files: FileIO | None = None,
) -> DiskTier | None:
    """The NVMe tier in `directory`; what it became is told.

    Raises:
        SettingInvalid: it cannot be used.
    """
    tier = None
    if directory is not None:
        tier = await asyncio.to_thread(disk_tier.open_tier, settings, directory, machinery.model, on_lost, files)
        if tier is None:
            directory.close()
    log.info(replace(machinery.sizes, nvme_slots=0 if tier is None else tier.num_slots).nvme_line)
    return tier


def _tell_drain(num_blocks: int) -> None:
    log.info("draining: %d blocks are still to be written to NVMe", num_blocks)


def load(settings: Settings) -> Machinery:
    """Fetch, check and load the model, and set up its arena; blocking.

    Raises:
        SettingInvalid, ModelError: as for `opened`.
    """
    device = choose_device(settings.device)
    if settings.threads != "auto":
        torch.set_num_threads(settings.threads)
    source = {
        "revision": settings.revision,
        "dtype": settings.dtype,
        "device": str(device),
        "cache_dir": settings.cache_dir,
        "hf_token": settings.hf_token.get_secret_value() if settings.hf_token else None,
        "progress": log.info,
    }
    refuse_misfit(settings, device, loader.estimate(settings.model, **source))  # type: ignore[arg-type]
    model = loader.load(
        settings.model,
        block_tokens=settings.block_tokens,
        compile=settings.compile,
        **source,  # type: ignore[arg-type]
    )
    budgets = sizes.plan(
        settings,
        model.layout,
        memory_of(device),
        host=sizes.host_memory(),
        on_cpu=device.type == "cpu",
        weights_bytes=0,
        model_context=model.max_positions,
    )
    for line in budgets.lines():
        log.info(line)
    log.info("checking whether answers can be made independent of batching")
    is_exact, why = exactness.choose(settings.attention, model.model, model.layout, model.model_key, settings.cache_dir)
    log.info(why)
    model = replace(model, model_key=exactness.mode_key(model.model_key, is_exact))
    runner = Runner(model.model, model.layout, budgets.hbm_slots, exact=is_exact)
    slab = make_slab(budgets.dram_slots, model.layout.slot_bytes, device, sizes.RING_SLOTS)
    slab.open()
    pace = probe.measure(runner, slab, _probed_folder(settings)) if settings.cost_gate == "auto" else NOT_MEASURED
    return Machinery(model, runner, slab, budgets, why, pace)


def _probed_folder(settings: Settings) -> Path | None:
    """Where the disk tier is; None without one, or before it was first used."""
    return settings.nvme_dir if settings.nvme_bytes and settings.nvme_dir.is_dir() else None


def choose_device(wanted: str) -> torch.device:
    """The device asked for; `auto` is CUDA where there is one.

    Raises:
        SettingInvalid: there is no such device.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingInvalid("--device", f"there is no {wanted} on this machine")
    return device


def memory_of(device: torch.device) -> sizes.Memory:
    """Memory that weights and K/V share: the device's own, and for a CPU the host's."""
    if device.type == "cpu":
        return sizes.host_memory()
    free, total = torch.cuda.mem_get_info(device)
    return sizes.Memory(total, free)


def refuse_misfit(settings: Settings, device: torch.device, weights_bytes: int) -> None:
    """Hold weights and budgets against free memory before loading anything.

    The layout is known only after loading, so blocks are taken for as small as can be: what is
    refused here could not fit in any layout.
    """
    smallest = KVLayout((LayerKV(1, 1),), settings.block_tokens, "bf16", 2)
    sizes.plan(
        settings,
        smallest,
        memory_of(device),
        host=sizes.host_memory(),
        on_cpu=device.type == "cpu",
        weights_bytes=weights_bytes,
        model_context=2**62,
    )


def make_slab(slots: int, slot_bytes: int, device: torch.device, ring_slots: int = 0) -> DramSlab:
    """Host memory for sleeping sessions, not yet taken; pinned where `device` has a copy engine of its own."""
    if device.type == "cpu":
        return DramSlab(slots, slot_bytes, num_ring=ring_slots)
    from kvstore.tiers.cuda import CudaPinning

    return DramSlab(slots, slot_bytes, num_ring=ring_slots, pinning=CudaPinning())


def make_transfers(
    settings: Settings, machinery: Machinery, slab: DramSlab, engine: Engine, tier: DiskTier | None = None
) -> Transfers:
    """Copies between the runner's arena and `slab`, which is open until they are closed; call it on the event loop.

    Those that nobody waits for yield to `engine`.
    """
    threads = settings.copy_threads
    if threads == "auto":
        # On few cores a second one would only take time from the step that computes: one reaches 6 GB/s on two.
        threads = 2 if (os.cpu_count() or 1) >= 8 else 1
    stores: dict[Tier, SlotStore] = {Tier.HBM: hbm_store(machinery.runner.arena, slab.slot_bytes)}
    share = settings.copy_share
    if share == "auto":
        share = CPU_COPY_SHARE if machinery.model.device.type == "cpu" else 1.0
    yielding = Yielding(share, lambda: engine.is_busy)
    workers = {Tier.DRAM: Workers("dram-copy", threads, yielding)}
    if tier is not None:
        stores[Tier.NVME] = tier.disk.store
        # Writes never take the last one: a disk that is slow to take keeps nobody from waking.
        reserved = 1 if settings.nvme_threads > 1 else 0
        workers[Tier.NVME] = Workers("nvme-io", settings.nvme_threads, yielding, reserved=reserved)
    return Transfers(slab, stores, workers)


def make_engine(settings: Settings, machinery: Machinery, on_step: object, choose: Choose = sample) -> Engine:
    """The step loop, not yet running."""
    model = machinery.model
    return Engine(
        machinery.runner,
        model.tokenizer.backend_tokenizer,
        model.eos_ids,
        max_context=machinery.sizes.max_context,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        on_step=on_step,  # type: ignore[arg-type]
        choose=choose,
    )


def make_manager(
    settings: Settings, machinery: Machinery, engine: Engine, transfers: Transfers, tier: DiskTier | None = None
) -> TierManager:
    """The store with nothing in it."""
    config = PlannerConfig(
        hbm_slots=machinery.sizes.hbm_slots,
        dram_slots=machinery.sizes.dram_slots,
        nvme_slots=0 if tier is None else tier.num_slots,
        ring_slots=0 if tier is None else sizes.RING_SLOTS,
        slot_bytes=machinery.sizes.slot_bytes,
        nvme_write_policy=WritePolicy(settings.nvme_write_policy),
        nvme_rated_bytes_per_day=0 if tier is None else tier.rated_bytes_per_day,
        nvme_min_tokens=settings.nvme_min_tokens,
        idle_to_nvme_seconds=settings.idle_to_nvme_seconds,
        cost_gate=settings.cost_gate,
        prefill_tokens_per_second=machinery.pace.prefill_tokens_per_second,
        dram_blocks_per_second=machinery.pace.dram_blocks_per_second,
        nvme_blocks_per_second=machinery.pace.nvme_blocks_per_second,
        max_transfers=settings.max_transfers,
        max_hints=settings.max_hints,
        look_ahead_turns=settings.look_ahead_turns,
        wake_deadline_seconds=settings.wake_deadline_seconds,
        demote_deadline_seconds=settings.demote_deadline_seconds,
        tier_backoff_seconds=settings.tier_backoff_seconds,
        clean_share=settings.clean_share,
        hbm_high=settings.hbm_high,
        hbm_low=settings.hbm_low,
        dram_high=settings.dram_high,
        dram_low=settings.dram_low,
        block_tokens=settings.block_tokens,
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        age_limit_seconds=settings.age_limit_seconds,
    )
    return TierManager(
        Planner(config),
        engine,
        max_context=machinery.sizes.max_context,
        mover=transfers,
        journal=None if tier is None else tier.disk.blocks,
        prober=tier,
    )


def make_gateway(
    settings: Settings,
    machinery: Machinery,
    manager: TierManager,
    text_threads: ThreadPoolExecutor,
    tier: DiskTier | None = None,
) -> Gateway:
    """Everything routes need, and the counters of it."""
    model = machinery.model
    metrics = Metrics(MissReason)
    metrics.watch_store(manager.snapshot)
    metrics.describe_model({"name": model.name, "device": str(model.device), "dtype": model.layout.dtype})
    book = SessionBook(max_sessions=settings.max_sessions, max_branches=settings.session_branches)
    metrics.watch_sessions(book)
    if tier is not None:
        metrics.watch_disk(tier.disk)
    keeper = Keeper(book, manager, journal=None if tier is None else tier.journal)
    if tier is not None:
        keeper.lost = tier.lost
    return Gateway(
        settings=settings,
        names=ServedNames(model.name, settings.served_model_name),
        model_key=model.model_key,
        defaults=model.defaults,
        block_tokens=settings.block_tokens,
        block_bytes=model.layout.slot_bytes,
        manager=manager,
        store=manager,
        keeper=keeper,
        disk=None if tier is None else tier.disk,
        hints=Hints(manager),
        chat=ChatTemplate(model.tokenizer),
        grammars=Grammars(model.tokenizer.backend_tokenizer, model.eos_ids),
        metrics=metrics,
        text_threads=text_threads,
        started_at=int(time.time()),
        nvme_rated_bytes_per_day=0 if tier is None else tier.rated_bytes_per_day,
    )
