"""What the disk of the NVMe tier gives here: blocks written and read as when serving, in a folder of their own."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from kvstore.errors import SettingInvalid
from kvstore.nvme_dir import ModelFolder
from kvstore.tiers.base import Run
from kvstore.tiers.nvme import NvmeStore, stride_bytes
from kvstore.transfers import RUN_BLOCKS
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from app.settings import Settings
    from kvstore.tiers.base import Landed
    from kvstore.tiers.dram import DramSlab

MOST_BYTES = 96 * 1024**2
"""About a session of 4K tokens of the embedded model: long enough for four threads, short enough to wait for."""
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DiskRates:
    """`mode` is how it is read and written: direct, or buffered; rates are 0 where `fault` says why there are none."""

    folder: str
    file_system: str
    mode: str = ""
    write_bytes_per_second: float = 0.0
    read_bytes_per_second: float = 0.0
    fault: str = ""


def measure(settings: Settings, slab: DramSlab, folder: Path) -> DiskRates:
    """Write blocks of `slab` under `folder` and read them back, with as many threads as serve; blocking.

    Written is what has reached the disk; what is read comes from the disk where the system can be made to forget it.
    """
    kind = file_system(folder)
    blocks = max(1, min(slab.num_slots, MOST_BYTES // slab.slot_bytes))
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place,
            ThreadPoolExecutor(settings.nvme_threads, "doctor-nvme") as threads,
        ):
            model = ModelFolder(Path(place) / "model", "doctor", b"doctor".ljust(16))
            store = NvmeStore(
                model,
                blocks,
                slab.slot_bytes,
                block_tokens=settings.block_tokens,
                make_room=lambda _size: True,
                io=settings.nvme_io,
                segment_bytes=blocks * stride_bytes(slab.slot_bytes),
            )
            store.open()
            try:
                return _measured(store, slab, blocks, model.slabs, threads, kind)
            finally:
                store.close()
    except (OSError, SettingInvalid) as exc:
        return DiskRates(str(folder), kind, fault=str(exc))


def _measured(
    store: NvmeStore, slab: DramSlab, blocks: int, slabs: Path, threads: ThreadPoolExecutor, kind: str
) -> DiskRates:
    for slot in range(blocks):
        # Compresses no better than K and V do: a disk that compresses must not look faster.
        slab.view(slot)[:] = os.urandom(slab.slot_bytes)

    def write() -> None:
        _all_runs(store.copy_in, slab, blocks, threads)
        for path in slabs.iterdir():
            _sync(path)

    writing, reading = [], []
    for _ in range(ROUNDS):
        writing.append(_seconds(write))
        for path in slabs.iterdir():
            _forget(path)
        reading.append(_seconds(lambda: _all_runs(store.copy_out, slab, blocks, threads)))
    size = blocks * slab.slot_bytes
    return DiskRates(
        str(slabs.parents[2]),
        kind,
        store.io,
        write_bytes_per_second=size / statistics.median(writing),
        read_bytes_per_second=size / statistics.median(reading),
    )


def _all_runs(copy: Callable[[Run], Landed], slab: DramSlab, blocks: int, threads: ThreadPoolExecutor) -> None:
    every = tuple(range(blocks))
    runs = [every[start : start + RUN_BLOCKS] for start in range(0, blocks, RUN_BLOCKS)]

    def one(slots: tuple[int, ...]) -> None:
        landed = copy(Run(slots, slab, slots, tuple(BlockKey(slot.to_bytes(16)) for slot in slots)))
        if landed.good != len(slots):
            raise OSError(f"a block did not reach the disk and back: {landed.reason.name.lower()}")

    list(threads.map(one, runs))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _forget(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def file_system(folder: Path) -> str:
    """What `folder` is on: ext4, tmpfs, nfs4; empty where it cannot be told."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
