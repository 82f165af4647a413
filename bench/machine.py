"""What the hardware does by itself, so that figures of two machines, or of two days, can be held against each other."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from bench.stats import Summary, summary

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7
COPY_BYTES = 256 * 1024**2
"""Above every cache, so that memory and not a cache is measured."""

MATMUL_SIZE = 1024
TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
BUSY_LOAD = 0.3
"""Runnable processes a core, by the one-minute load, above which figures are said to be a busy machine's."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Its parts and two rates. A byte copied counts once, though it is read and written."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    """That this process may use."""
    threads: int
    """That torch computes with by default."""
    memory_bytes: int
    python: str
    torch: str
    copy_bytes_per_second: Summary
    """One thread."""
    threaded_copy_bytes_per_second: Summary
    bf16_matmul_flop_per_second: Summary


def load_average() -> tuple[float, ...]:
    """Runnable processes over 1, 5 and 15 minutes."""
    return tuple(round(value, 2) for value in os.getloadavg())


def is_busy() -> bool:
    """Whether others compute on this machine, too; asked before a benchmark adds its own load."""
    return os.getloadavg()[0] > BUSY_LOAD * num_cores()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def calibrate() -> Machine:
    """Look and measure; a few seconds."""
    import torch

    name, flags = _cpu()
    return Machine(
        cpu=name,
        flags=tuple(flag for flag in TELLING_FLAGS if flag in flags),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
        torch=str(torch.__version__),
        copy_bytes_per_second=summary(copy_rates()),
        threaded_copy_bytes_per_second=_threaded_copy_rate(),
        bf16_matmul_flop_per_second=_matmul_rate(),
    )


def copy_rates() -> list[float]:
    """Bytes per second that one thread copies in memory, an entry per round."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    return _rates(lambda: np.copyto(target, source), COPY_BYTES)


def _threaded_copy_rate() -> Summary:
    import torch

    source = torch.ones(COPY_BYTES // 4)
    target = torch.zeros_like(source)
    return _rate(lambda: target.copy_(source), COPY_BYTES)


def _matmul_rate() -> Summary:
    import torch

    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(torch.bfloat16) for _ in range(2))
    return _rate(lambda: left @ right, 2 * MATMUL_SIZE**3)


def _rate(work: Callable[[], object], amount: float) -> Summary:
    return summary(_rates(work, amount))


def _rates(work: Callable[[], object], amount: float) -> list[float]:
    """`amount` a second; the first round, which touches fresh pages, is not counted."""
    work()
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - started))
    return rates


def _cpu() -> tuple[str, frozenset[str]]:
    """Its name and the extensions it says it has; both are empty or vague where there is no /proc."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1] if name else platform.machine(), frozenset(flags[1].split() if flags else ())
