"""`dormouse serve` as a process of its own, on a free loopback port, for as long as a block lasts."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from bench.errors import BenchFailed

ROOT = Path(__file__).parent.parent
READY_SECONDS = 1800.0
"""A model may have to be downloaded first."""

STOP_SECONDS = 60.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Server:
    """Where it answers, and how long it took until it did."""

    url: str
    ready_seconds: float


@contextmanager
def serving(flags: Sequence[str], place: Path | None = None) -> Iterator[Server]:
    """Start `dormouse serve` with `flags`, wait until it is ready, and stop it at the end.

    What it keeps on disk, in a temporary directory in `place`, goes with it, unless a flag says where to keep it.

    Raises:
        BenchFailed: it ended before it was ready; with the last lines that it said.
    """
    port = _free_port()
    command = [sys.executable, "-m", "dormouse_gateway", "serve", "--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory(dir=place) as folder:
        if not any(flag.startswith("--nvme-dir") for flag in flags):
            command += ["--nvme-dir", folder]
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, said)
            yield Server(url, time.perf_counter() - started)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    with httpx.Client(base_url=url, trust_env=False) as http:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise BenchFailed(f"dormouse serve ended with {process.returncode}:\n{_last_lines(said)}")
            try:
                if http.get("/readyz").is_success:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(POLL_SECONDS)
    raise BenchFailed(f"dormouse serve was not ready within {READY_SECONDS:.0f} s:\n{_last_lines(said)}")


def _last_lines(said: IO[bytes]) -> str:
    said.seek(0)
    return "\n".join(said.read().decode(errors="replace").splitlines()[-20:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
