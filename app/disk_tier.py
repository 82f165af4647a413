"""Opens the NVMe tier of a server, and lets go of it again.

take        the directory, before the model is loaded: a second server is refused in its first second
open_tier   slots, catalog, what an earlier process left, and slots that must be erased before any turn
...         serving
close       in bounded time, also where the disk hangs
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from app import scopes, sizes
from app.disk import Disk, sweep_others
from app.units import format_bytes
from kvstore import chain
from kvstore.block_journal import FolderBlocks, note_swept
from kvstore.catalog import Catalog
from kvstore.catalog_rows import SlotShape
from kvstore.clocks import Clocks
from kvstore.errors import SettingInvalid
from kvstore.events import TierHealth
from kvstore.nvme_dir import NvmeDirectory
from kvstore.reuse import MissReason
from kvstore.session_journal import CatalogJournal
from kvstore.tiers.nvme import NvmeStore, stride_bytes
from kvstore.types import Tier
from kvstore.workers import Workers

if TYPE_CHECKING:
    from pathlib import Path

    from app.settings import Settings
    from kvstore.catalog import Restored
    from kvstore.catalog_file import FolderRow
    from kvstore.events import FoundBlock
    from kvstore.tiers.file_io import FileIO
    from kvstore.types import BlockKey
    from models.loader import LoadedModel

log = logging.getLogger("dormouse.nvme")

FLAG = "--nvme-dir"

CLOSE_SECONDS = 2.0
"""For the last records after the drain: milliseconds, unless the disk hangs."""


@dataclass(slots=True)
class DiskTier:
    """What a running server keeps on disk, and how it began."""

    disk: Disk
    num_slots: int
    rated_bytes_per_day: int
    restored: Restored
    journal: CatalogJournal

    @property
    def lost(self) -> MissReason | None:
        """Why sessions of an earlier process may be missing, all of them."""
        if self.disk.directory.set_aside is not None:
            return MissReason.STORE_FORMAT
        loss = self.disk.catalog.loss
        return None if loss is None else loss.reason

    @property
    def found(self) -> list[FoundBlock]:
        """Blocks that can be read, in the planner's time."""
        now, unclaimed = time.monotonic(), set(self.restored.unclaimed)
        return [
            (key, parent, first, slot, now if last == -math.inf else last)
            for key, parent, first, slot, last in self.restored.blocks.rows()
            if slot < self.num_slots and slot not in unclaimed
        ]

    @property
    def owners(self) -> dict[BlockKey, str]:
        """Whose chains begin with which block."""
        return {
            chain.unpack(branch.keys[: chain.KEY_BYTES])[0]: scopes.owner(session.tenant)
            for session in self.restored.sessions
            for branch in session.branches.values()
            if branch.keys
        }

    def probe(self, tier: Tier, done: Callable[[TierHealth], None]) -> None:
        """Find out whether the disk works (kvstore.manager.Prober)."""
        assert tier is Tier.NVME
        loop, store = asyncio.get_running_loop(), self.disk.store

        def ask() -> None:
            health = TierHealth.OK if store.probe() else TierHealth.OFF
            loop.call_soon_threadsafe(done, health)

        self.disk.upkeep.submit(ask, urgent=True)

    async def close(self) -> None:
        """Commit what is pending and let go of the directory, or of a disk that hangs."""
        self.journal.close()
        self.disk.blocks.close()
        self.disk.upkeep.close()
        if not await asyncio.to_thread(self.disk.catalog.close, CLOSE_SECONDS):
            log.warning("the catalog could not be written in %.0f s: the last turns may be missing", CLOSE_SECONDS)
        self.disk.store.close()
        self.disk.directory.close()


def take(settings: Settings) -> NvmeDirectory | None:
    """The directory, locked; None where nothing is to be kept on disk. Blocking.

    Raises:
        SettingInvalid: another server holds it, or it cannot be used; names --nvme-dir.
    """
    if settings.nvme_bytes == 0:
        return None
    is_new = not settings.nvme_dir.exists()
    directory = NvmeDirectory(settings.nvme_dir, keep_free_share=settings.nvme_free_share)
    directory.open()
    if directory.set_aside is not None:
        log.warning("another version's sessions are set aside in %s", directory.set_aside)
    if is_new:
        log.warning(
            "conversations are kept on disk from now on, text and K/V, in %s; --nvme-bytes 0 stops that",
            settings.nvme_dir,
        )
    return directory


def disk_of(root: Path, held_bytes: int) -> sizes.Disk:
    """The file system that `root` is on."""
    usage = shutil.disk_usage(root)
    stat = os.statvfs(root)
    return sizes.Disk(usage.total, stat.f_bavail * stat.f_frsize, held_bytes)


def open_tier(
    settings: Settings,
    directory: NvmeDirectory,
    model: LoadedModel,
    tell_lost: Callable[[], None],
    files: FileIO | None = None,
) -> DiskTier | None:
    """Everything of the tier but the planner's part; None where the budget holds nothing. Blocking.

    `tell_lost` is called on the catalog's thread when the file had to be begun anew while serving. Where this raises,
    files and catalog are closed, and the directory is the caller's still.

    Raises:
        SettingInvalid: the directory cannot be used, or the budget is not there.
    """
    layout = model.layout
    disk = disk_of(directory.root, directory.bytes_held)
    slots = sizes.nvme_slots(settings, layout.slot_bytes, disk)
    if not slots:
        return None
    directory.quota_bytes = slots * stride_bytes(layout.slot_bytes)
    wall = time.time()
    place = directory.folder(model.name, model.model_key)
    store = NvmeStore(
        place,
        slots,
        layout.slot_bytes,
        block_tokens=layout.block_tokens,
        make_room=directory.make_room,
        io=settings.nvme_io,
        files=files,
    )
    with ExitStack() as undoing:
        undoing.callback(store.close)
        store.open()
        catalog = Catalog.open(directory.catalog, wall)
        undoing.callback(catalog.close, CLOSE_SECONDS)
        shape = SlotShape(layout.block_tokens, layout.slot_bytes, layout.dtype)
        row = catalog.folder(model.name, model.model_key, shape, wall)
        restored = _restored(settings, directory, catalog, row, store)
        catalog.start(row, restored.next_serial, tell_lost)
        log.info(
            "NVMe %s in %s (%s IO): %d sessions and %d blocks from before",
            format_bytes(directory.quota_bytes),
            place.path,
            store.io,
            len(restored.sessions),
            len(restored.blocks),
        )
        upkeep = Workers("nvme-upkeep", 2, reserved=1)
        forget = partial(note_swept, catalog)
        directory.on_removed = lambda _path: upkeep.submit(
            lambda: sweep_others(directory, catalog, forget, row), urgent=False
        )
        journal, blocks = CatalogJournal(catalog), FolderBlocks(catalog, row, store.erase)
        store.before_write = blocks.await_forgotten
        undoing.pop_all()
    return DiskTier(
        disk=Disk(directory, catalog, row, store, blocks, upkeep),
        num_slots=slots,
        rated_bytes_per_day=sizes.rated_bytes_per_day(settings, disk),
        restored=restored,
        journal=journal,
    )


def _restored(
    settings: Settings, directory: NvmeDirectory, catalog: Catalog, row: FolderRow, store: NvmeStore
) -> Restored:
    """What an earlier process left, without what has expired or was deleted, of this model and of the others.

    Raises:
        SettingInvalid: what was deleted cannot be erased.
    """
    clocks = Clocks(time.monotonic(), time.time())
    restored = catalog.restore(row, clocks, settings.max_sessions, store.scan, store.num_slots)
    if restored.unclaimed:
        left = store.erase(slot for slot in restored.unclaimed if slot < store.num_slots)
        if left:
            raise SettingInvalid(FLAG, f"{len(left)} slots of deleted sessions in {directory.root} cannot be erased")
        catalog.swept(row, restored.unclaimed)
    # Sessions of other models that expired meanwhile, or were deleted before a crash.
    sweep_others(directory, catalog, catalog.swept, row)
    if catalog.loss is not None:
        log.warning("the catalog of sessions was lost (%s), kept as %s", catalog.loss.reason, catalog.loss.kept_as)
    return restored
