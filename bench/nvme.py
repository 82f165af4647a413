"""How fast blocks go to files and come back, beside what fio reads from the same file.

`blocks` blocks of a session, in runs as the planner makes them, on as many threads as NVMe has; store and threads are
the server's, without planner, loop and engine. Each round takes every way in turn, so that a disturbance spoils a
sample of each. Written is what has reached the disk, with an fsync at the end in either mode; what is read comes from
the disk, too: pages that the system kept are dropped before. fio reads the same file as often, in pieces of a run, with
as many jobs as there are threads.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.errors import BenchFailed
from bench.report import spread
from bench.stats import summary
from kvstore.errors import SettingInvalid
from kvstore.nvme_dir import ModelFolder
from kvstore.tiers.base import Landed, Run
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.nvme import NvmeStore, stride_bytes
from kvstore.transfers import RUN_BLOCKS
from kvstore.types import BlockKey
from kvstore.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

EMBEDDED_SLOT_BYTES = 737_280
"""A block of 32 tokens of the embedded model."""

GOAL = 0.85
"""Of what fio reads; the project's own bar."""

READ_PASSES = 3
"""Over the same file, ours and fio's: one takes so little time that the start of fio's threads would show in it, and
disks that slow down after a burst must have given as much to either."""

Mode = Literal["direct", "buffered"]
MODES: tuple[Mode, ...] = ("direct", "buffered")


@dataclass(frozen=True, slots=True)
class NvmePlan:
    """What to measure."""

    blocks: int = 128
    slot_bytes: int = EMBEDDED_SLOT_BYTES
    threads: int = 4
    rounds: int = 5

    @property
    def num_rounds(self) -> int:
        return self.rounds * (len(MODES) + 1)

    @property
    def payload_bytes(self) -> int:
        return self.blocks * self.slot_bytes


@dataclass(slots=True)
class NvmeSamples:
    """Bytes per second, an entry per round; `fio` is empty where it is not installed."""

    plan: NvmePlan
    path: str
    skipped: dict[str, str] = field(default_factory=dict)  # a mode that this file system does not have, and why
    written: dict[str, list[float]] = field(default_factory=dict)
    read: dict[str, list[float]] = field(default_factory=dict)
    fio: list[float] = field(default_factory=list)

    @property
    def share_of_fio(self) -> float | None:
        """Of the medians, read directly."""
        if not self.fio or "direct" not in self.read:
            return None
        return summary(self.read["direct"]).median / summary(self.fio).median


def measure(plan: NvmePlan, directory: Path, done: Callable[[str], None]) -> NvmeSamples:
    """Write and read a session, `rounds` times each way, in a folder of its own under `directory`.

    Raises:
        BenchFailed: a block did not come back, or fio failed.
    """
    samples = NvmeSamples(plan, str(directory))
    slab = DramSlab(plan.blocks, plan.slot_bytes)
    slab.open()
    _fill(slab)
    workers = Workers("nvme-io", plan.threads)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=directory) as place,
            _stores(plan, Path(place), samples) as stores,
        ):
            for number in range(plan.rounds):
                for mode, store in stores.items():
                    path = _slab_of(Path(place), mode)
                    samples.written.setdefault(mode, []).append(_rate(plan, _write(store, slab, workers, path)))
                    samples.read.setdefault(mode, []).append(_rate(plan, _read(store, slab, workers, path)))
                    done(f"{mode} {number + 1}")
                if "direct" in stores and shutil.which("fio"):
                    samples.fio.append(_fio(plan, _slab_of(Path(place), "direct")))
                    done(f"fio {number + 1}")
    finally:
        workers.close()
        workers.join(30.0)
        slab.close()
    return samples


@contextmanager
def _stores(plan: NvmePlan, place: Path, samples: NvmeSamples) -> Iterator[dict[Mode, NvmeStore]]:
    stores: dict[Mode, NvmeStore] = {}
    for mode in MODES:
        folder = ModelFolder(place / _folder_name(mode), mode, mode.encode().ljust(16))
        # One file, so that fio reads what we read.
        whole = plan.blocks * stride_bytes(plan.slot_bytes)
        store = NvmeStore(
            folder,
            plan.blocks,
            plan.slot_bytes,
            block_tokens=32,
            make_room=lambda size: True,
            io=mode,
            segment_bytes=whole,
        )
        try:
            store.open()
        except SettingInvalid as exc:
            samples.skipped[mode] = str(exc)
            continue
        stores[mode] = store
    try:
        yield stores
    finally:
        for store in stores.values():
            store.close()


def _folder_name(mode: Mode) -> str:
    return f"{mode}-0123456789ab"


def _slab_of(place: Path, mode: Mode) -> Path:
    return place / _folder_name(mode) / "slabs" / "0000.kv"


def _write(store: NvmeStore, slab: DramSlab, workers: Workers, path: Path) -> float:
    """Seconds until all blocks are on the disk."""
    started = time.perf_counter()
    _all_runs(slab, store.copy_in, workers)
    fd = os.open(path, os.O_RDWR)
    os.fdatasync(fd)
    os.close(fd)
    return time.perf_counter() - started


def _read(store: NvmeStore, slab: DramSlab, workers: Workers, path: Path) -> float:
    """Seconds until all blocks are in memory, verified; of one pass."""
    seconds = 0.0
    for _ in range(READ_PASSES):
        _drop_pages(path)
        started = time.perf_counter()
        _all_runs(slab, store.copy_out, workers)
        seconds += time.perf_counter() - started
    return seconds / READ_PASSES


def _all_runs(slab: DramSlab, copy: Callable[[Run], Landed], workers: Workers) -> None:
    ends: list[Landed] = []
    finished = threading.Semaphore(0)
    every = tuple(range(slab.num_slots))
    runs = [every[start : start + RUN_BLOCKS] for start in range(0, slab.num_slots, RUN_BLOCKS)]

    def one(slots: tuple[int, ...]) -> None:
        try:
            ends.append(copy(Run(slots, slab, slots, tuple(BlockKey(slot.to_bytes(16)) for slot in slots))))
        finally:
            finished.release()

    for slots in runs:
        workers.submit(lambda slots=slots: one(slots), urgent=True)  # type: ignore[misc]
    for _ in runs:
        finished.acquire()
    if sum(landed.good for landed in ends) != slab.num_slots:
        raise BenchFailed(f"not every block made it: {sorted({landed.reason.value for landed in ends})}")


def _fill(slab: DramSlab) -> None:
    """With what compresses no better than K and V do: a disk that compresses must not look faster."""
    for slot in range(slab.num_slots):
        slab.view(slot)[:] = os.urandom(slab.slot_bytes)


def _drop_pages(path: Path) -> None:
    """Make the system forget what it keeps of a file; the caller has synced it."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _rate(plan: NvmePlan, seconds: float) -> float:
    return plan.payload_bytes / seconds


def _fio(plan: NvmePlan, path: Path) -> float:
    """Bytes per second that fio reads from `path`, directly and in pieces of a run."""
    piece = min(RUN_BLOCKS, plan.blocks) * stride_bytes(plan.slot_bytes)
    pieces = max(1, plan.blocks // RUN_BLOCKS)
    jobs = min(plan.threads, pieces)
    share = pieces // jobs * piece
    command = [
        *("fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--direct=1", "--ioengine=psync"),
        *(f"--bs={piece}", f"--size={share}", f"--offset_increment={share}", f"--numjobs={jobs}"),
        *(f"--loops={READ_PASSES}", "--thread", "--group_reporting", "--output-format=json"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise BenchFailed(f"fio: {(ended.stderr or ended.stdout).strip()}")
    # Progress of some versions comes before the JSON.
    said = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0]["read"]
    return float(said["io_bytes"] / (max(1, said["runtime"]) / 1e3))


def table(samples: NvmeSamples) -> Group:
    """For people."""
    plan = samples.plan
    rows = Table()
    for column in ("", "read GB/s", "read ms", "written GB/s, on disk"):
        rows.add_column(column, justify="right")
    for mode in samples.read:
        read, written = summary(samples.read[mode]), summary(samples.written[mode])
        milliseconds = [plan.payload_bytes / rate * 1e3 for rate in samples.read[mode]]
        rows.add_row(mode, spread(read.scaled(1e-9), 2), spread(summary(milliseconds)), spread(written.scaled(1e-9), 2))
    if samples.fio:
        rows.add_row("fio --direct=1", spread(summary(samples.fio).scaled(1e-9), 2), "", "")
    title = (
        f"{plan.blocks} blocks of {plan.slot_bytes:,} bytes, {plan.threads} threads, runs of {RUN_BLOCKS}; "
        f"under {samples.path}; verified as they are read"
    )
    return Group(Text(title), rows, *(Text(line) for line in _lines(samples)))


def _lines(samples: NvmeSamples) -> Sequence[str]:
    lines = [f"{mode}: {why}" for mode, why in samples.skipped.items()]
    share = samples.share_of_fio
    if share is not None:
        lines.append(f"{share:.0%} of what fio reads; the bar is {GOAL:.0%}")
    elif not shutil.which("fio"):
        lines.append("fio is not installed, so there is nothing to compare with (apt install fio)")
    return lines


def part(samples: NvmeSamples) -> dict[str, Any]:
    """For programs."""
    return {**asdict(samples), "summary": {"share_of_fio": samples.share_of_fio, "goal": GOAL}}
