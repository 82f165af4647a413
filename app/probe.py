"""What start-up measures in a fifth of a second: the seeds of the restore-or-recompute gate, and `doctor`'s figures.

Rough on purpose: running means of what really happens take over with the first turns (kvstore/cost.py).
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.base import Run
from kvstore.tiers.hbm import hbm_store
from models.runner import Chunk

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.tiers.dram import DramSlab
    from models.runner import Runner

PREFILL_TOKENS = 128
COPIED_BLOCKS = 8
ROUNDS = 3
FILE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one machine, one model; 0 is not known. Blocks per second are those of one thread, up to HBM or DRAM."""

    prefill_tokens_per_second: float = 0.0
    dram_blocks_per_second: float = 0.0
    nvme_blocks_per_second: float = 0.0


NOT_MEASURED = Pace()


def measure(runner: Runner, slab: DramSlab, folder: Path | None) -> Pace:
    """All of it; `folder` is on the disk that sessions sleep on, None where they do not. Blocking."""
    return Pace(
        prefill_tokens_per_second=prefill_rate(runner),
        dram_blocks_per_second=dram_rate(runner, slab),
        nvme_blocks_per_second=0.0 if folder is None else disk_rate(folder) / slab.slot_bytes,
    )


def prefill_rate(runner: Runner, tokens: int = PREFILL_TOKENS) -> float:
    """Tokens per second of a prompt without history; the arena is as it was."""
    block = runner.layout.block_tokens
    slots = range(min(-(-tokens // block), runner.arena.slots))
    tokens = min(tokens, len(slots) * block)
    chunk = Chunk(array("I", range(1, tokens + 1)), 0, slots, wants_logits=True)
    seconds = _median(lambda: runner.run([chunk]), rounds=1)
    runner.clear(slots)
    return tokens / seconds


def dram_rate(runner: Runner, slab: DramSlab) -> float:
    """Blocks per second from DRAM to HBM; 0 without DRAM. Both are empty and stay so."""
    blocks = min(COPIED_BLOCKS, slab.num_slots, runner.arena.slots)
    if not blocks:
        return 0.0
    store = hbm_store(runner.arena, slab.slot_bytes)
    run = Run(tuple(range(blocks)), slab, tuple(range(blocks)), (None,) * blocks)
    return blocks / _median(lambda: store.copy_in(run))


def disk_rate(folder: Path) -> float:
    """Bytes per second that one thread reads from a file just written in `folder`; 0 where that cannot be told."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file, mmap.mmap(-1, FILE_BYTES) as buffer:
            buffer.write(os.urandom(4096) * (FILE_BYTES // 4096))
            os.pwrite(file.fileno(), buffer, 0)
            os.fsync(file.fileno())
            return FILE_BYTES / _median(lambda: _read(file.fileno(), buffer))
    except OSError:
        return 0.0


def _read(fd: int, buffer: mmap.mmap) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.preadv(fd, [buffer], 0)


def _median(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds that `work` takes, after a first time that does not count where there are more rounds than one."""
    seconds = []
    for _ in range(rounds + (rounds > 1)):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[rounds > 1 :])
