"""The store of a crash round, whole and real but for the model: opened on a directory, and let go of again."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.disk import ANY_NUMBER, Disk, sweep_others
from app.disk_tier import DiskTier
from app.keeper import Keeper, written
from kvstore import chain
from kvstore.block_journal import FolderBlocks
from kvstore.catalog import Catalog
from kvstore.catalog_rows import SlotShape
from kvstore.clocks import Clocks
from kvstore.config import PlannerConfig
from kvstore.events import WritePolicy
from kvstore.history import History, Seam, text_digests
from kvstore.manager import TierManager
from kvstore.nvme_dir import NvmeDirectory
from kvstore.planner import Planner
from kvstore.session_journal import CatalogJournal
from kvstore.sessions import SessionBook
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.nvme import NvmeStore, stride_bytes
from kvstore.transfer import Transfers
from kvstore.types import StepReport, StopReason, Tier, TurnSpec
from kvstore.workers import Workers
from tests.crash.model import BLOCK_TOKENS, SLOT_BYTES, Arena, Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.file_io import FileIO
    from kvstore.types import BlockKey

MODEL = b"crash rounds' own"[:16]
SPACE = chain.namespace(MODEL, "", None)
STRIDE = stride_bytes(SLOT_BYTES)
SEGMENT_SLOTS = 24
SHAPE = SlotShape(BLOCK_TOKENS, SLOT_BYTES, "digest")
COMMIT_SECONDS = 5.0
RING_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Form:
    """How large the tiers of one process are, and what it writes when."""

    hbm_slots: int = 40
    dram_slots: int = 30
    nvme_slots: int = 200
    policy: str = WritePolicy.EVERY_TURN
    io: Literal["auto", "buffered"] = "auto"

    @property
    def quota_bytes(self) -> int:
        return self.nvme_slots * STRIDE

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Said:
    """One finished turn."""

    output: list[int]
    reused: dict[Tier, int]
    prompt_blocks: int
    """That could have been reused."""


class Open:
    """A store that runs."""

    def __init__(self, manager: TierManager, keeper: Keeper, tier: DiskTier) -> None:
        self.manager = manager
        self.keeper = keeper
        self.tier = tier

    async def turn(self, name: str, prompt: array[int], count: int) -> Said:
        """As app.turns has it: recorded and committed before anybody hears of its end."""
        await self.keeper.recall("", name)
        place = self.keeper.begin("", name, prompt)
        lease = await self.manager.acquire(TurnSpec(prompt, count, SPACE, None, to_nvme=True))
        stopped = None
        async for piece in lease.pieces():
            stopped = piece.stopped
        ids = array("I", lease.token_ids)
        cached = lease.grant.cached_tokens + lease.stored_tokens
        blocks = written(ids, BLOCK_TOKENS, SPACE, computed_tokens=cached, history_tokens=len(ids))
        if stopped is not StopReason.LENGTH:  # the drain cut it off
            await lease.close()
            self.keeper.abandon(place, blocks)
            raise asyncio.CancelledError
        self.keeper.record(place, _history(ids, len(prompt)), blocks)
        await self.keeper.settled(COMMIT_SECONDS)
        await lease.close()
        reused = {tier: tokens for tier, tokens in lease.grant.reused.items() if tokens}
        return Said(list(ids[len(prompt) :]), reused, (len(prompt) - 1) // BLOCK_TOKENS)

    def keys_of(self, name: str) -> Sequence[BlockKey]:
        """Of the blocks of a session's branches that are known, one after the other."""
        session = self.keeper.book.get("", name)
        return [] if session is None else [key for each in session.branches.values() for key in each.block_keys]

    async def until_idle(self) -> None:
        """Until nothing is on its way between tiers or to be erased."""
        async with asyncio.timeout(30.0):
            while (now := self.manager.snapshot()).transfers or now.tier(Tier.NVME).erasing:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def check(self) -> None:
        """All laws, and that no slot is missing from any count."""
        self.manager.check()
        for tier in self.manager.snapshot().tiers:
            counted = tier.free + tier.open + tier.filling + tier.valid + tier.quarantined + tier.erasing
            assert counted == tier.capacity, tier

    def check_idle(self) -> None:
        """And that nobody holds any."""
        self.check()
        snapshot = self.manager.snapshot()
        assert (snapshot.turns.granted, snapshot.turns.waiting, snapshot.turns.suspended) == (0, 0, 0)
        for tier in snapshot.tiers:
            assert tier.free + tier.valid == tier.capacity, tier
            assert tier.pinned == 0, tier


def _history(ids: array[int], first_answer: int) -> History:
    """With the ids for words."""
    text = " ".join(map(str, ids))
    ends = (Seam(len(text), len(ids)),)
    return History(ids, text, ends, first_answer, ends, text_digests(text, [len(text)]))


def open_tier(root: Path, form: Form, files: FileIO | None = None) -> DiskTier:
    """As app.disk_tier.open_tier has it, with files of a few slots and without a model's settings."""
    directory = NvmeDirectory(root, quota_bytes=form.quota_bytes, keep_free_share=0.0)
    directory.open()
    wall = time.time()
    place = directory.folder("digests", MODEL)
    store = NvmeStore(
        place,
        form.nvme_slots,
        SLOT_BYTES,
        block_tokens=BLOCK_TOKENS,
        make_room=directory.make_room,
        io=form.io,
        files=files,
        segment_bytes=SEGMENT_SLOTS * STRIDE,
    )
    store.open()
    catalog = Catalog.open(directory.catalog, wall)
    row = catalog.folder("digests", MODEL, SHAPE, wall)
    restored = catalog.restore(row, Clocks(time.monotonic(), wall), 1000, store.scan, form.nvme_slots)
    if restored.unclaimed:
        left = store.erase(slot for slot in restored.unclaimed if slot < form.nvme_slots)
        assert not left
        catalog.swept(row, restored.unclaimed)
    sweep_others(directory, catalog, catalog.swept, row)
    catalog.start(row, restored.next_serial)
    blocks = FolderBlocks(catalog, row, store.erase)
    store.before_write = blocks.await_forgotten
    return DiskTier(
        disk=Disk(directory, catalog, row, store, blocks, Workers("nvme-upkeep", 2, reserved=1)),
        num_slots=form.nvme_slots,
        rated_bytes_per_day=0,
        restored=restored,
        journal=CatalogJournal(catalog),
    )


@contextmanager
def files_of(directory: NvmeDirectory) -> Iterator[NvmeStore]:
    """The slots that a killed process left, to be looked at: whole files, whatever its quota was."""
    (place,) = directory.folders()
    store = NvmeStore(
        place,
        ANY_NUMBER,
        SLOT_BYTES,
        block_tokens=BLOCK_TOKENS,
        make_room=lambda _size: False,
        io="buffered",
        segment_bytes=SEGMENT_SLOTS * STRIDE,
    )
    store.open()
    try:
        yield store
    finally:
        store.close()


@asynccontextmanager
async def opened(root: Path, form: Form, files: FileIO | None = None) -> AsyncIterator[Open]:
    """Everything that runs in a server below HTTP; let go of at the end without a drain."""
    loop = asyncio.get_running_loop()
    tier = open_tier(root, form, files)
    arena = Arena(form.hbm_slots)
    arena.open()
    slab = DramSlab(form.dram_slots, SLOT_BYTES, num_ring=RING_SLOTS)
    slab.open()

    def on_step(report: StepReport) -> None:
        loop.call_soon_threadsafe(manager.step_ended, report)

    engine = Engine(arena, on_step)
    workers = {Tier.DRAM: Workers("dram-copy", 1), Tier.NVME: Workers("nvme-io", 3, reserved=1)}
    transfers = Transfers(slab, {Tier.HBM: arena, Tier.NVME: tier.disk.store}, workers)
    manager = TierManager(
        Planner(_config(form)),
        engine,
        max_context=form.hbm_slots * BLOCK_TOKENS,
        mover=transfers,
        journal=tier.disk.blocks,
        prober=tier,
    )
    keeper = Keeper(SessionBook(max_sessions=1000, max_branches=4), manager, journal=tier.journal)
    manager.take_over(tier.found)
    keeper.restore(tier.restored)
    try:
        yield Open(manager, keeper, tier)
    finally:
        await manager.drain(0.0)
        keeper.close()
        await transfers.close(5.0)
        engine.close()
        await tier.close()


def _config(form: Form) -> PlannerConfig:
    return PlannerConfig(
        cost_gate="off",
        hbm_slots=form.hbm_slots,
        dram_slots=form.dram_slots,
        nvme_slots=form.nvme_slots,
        ring_slots=RING_SLOTS,
        slot_bytes=SLOT_BYTES,
        block_tokens=BLOCK_TOKENS,
        max_running=8,
        max_queue=1000,
        age_limit_seconds=1.0,
        output_slice_tokens=BLOCK_TOKENS,
        nvme_write_policy=WritePolicy(form.policy),
        idle_to_nvme_seconds=0.02,
        # A killed round ends before any of these; on a machine that is busy nothing is to come late.
        wake_deadline_seconds=20.0,
        demote_deadline_seconds=20.0,
    )
