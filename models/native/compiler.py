"""The kernels' sources -> a library for CPUs with AVX512-BF16, kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("matmul.c", "attention.c", "decoder.c")
HEADERS = ("kernels.h",)
FLAGS = ("-std=gnu11", "-O3", "-march=x86-64-v4", "-mavx512bf16", "-fopenmp", "-fPIC", "-shared", "-w")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_SECONDS = 120.0
NEEDED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})


class NoKernels(Exception):
    """There is no library for this machine; the message is the reason."""


def library(cache_dir: Path) -> ctypes.CDLL:
    """The kernels, compiled where this machine has not compiled these sources yet (seconds); blocking.

    Import torch first: the library shares its OpenMP threads, found by name among what is loaded.

    Raises:
        NoKernels: another kind of CPU, no compiler, or one that fails.
    """
    missing = NEEDED_CPU_FLAGS - cpu_flags()
    if missing:
        raise NoKernels(f"this CPU has no {', '.join(sorted(missing))}")
    target = cache_dir / "kernels" / f"{_identity()}.so"
    if not target.exists():
        _compile(target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NoKernels(f"the compiled library cannot be loaded: {error}") from error


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(found.split())


def _identity() -> str:
    """Of the sources and the flags; a compiler's update alone compiles nothing again."""
    digest = hashlib.blake2b(digest_size=12)
    for name in (*HEADERS, *SOURCES):
        digest.update(Path(__file__).with_name(name).read_bytes())
    for part in (*FLAGS, platform.machine()):
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def _compile(target: Path) -> None:
    compiler = next((name for name in COMPILERS if shutil.which(name)), "")
    if not compiler:
        raise NoKernels("there is no C compiler (cc, gcc or clang)")
    folder = Path(__file__).parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, then renamed: two servers that start at once each put a whole file there.
        with tempfile.TemporaryDirectory(dir=target.parent) as building:
            built = Path(building) / "kernels.so"
            command = [compiler, *FLAGS, "-o", str(built), *(str(folder / name) for name in SOURCES), "-lm"]
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=False
            )
            if done.returncode:
                raise NoKernels(f"{compiler} failed: {done.stderr.strip()[-300:] or done.returncode}")
            built.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"compiling failed: {error}") from error
