"""A server as a process of its own, on a free loopback port, for as long as a block lasts: ours, or another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    port = free_port()
    command = [sys.executable, "-m", "dormouse_gateway", "serve", "--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory(prefix="bench-serve-", dir=place) as folder:
        if not any(flag.startswith("--nvme-dir") for flag in flags):
            command += ["--nvme-dir", folder]
        with running("dormouse serve", command, f"http://127.0.0.1:{port}", "/readyz", cwd=ROOT) as server:
            yield server


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    url: str,
    ready_path: str,
    *,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[Server]:
    """Start `command`, wait until `ready_path` answers well, and stop it and all that it started at the end.

    Raises:
        BenchFailed: it cannot be started, ended, or was not ready in time; with the last lines that it said.
    """
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        try:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # so that its children can be stopped with it, and Ctrl-C is for us
            )
        except OSError as exc:
            raise BenchFailed(f"{name} cannot be started: {exc}") from exc
        try:
            _wait_until_ready(process, name, url + ready_path, said, ready_seconds)
            yield Server(url, time.perf_counter() - started)
        finally:
            _stop(process)


def free_port() -> int:
    """One that nobody listens on, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(
    process: subprocess.Popen[bytes], name: str, url: str, said: IO[bytes], ready_seconds: float
) -> None:
    deadline = time.monotonic() + ready_seconds
    with httpx.Client(trust_env=False) as http:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise BenchFailed(f"{name} ended with {process.returncode}:\n{_last_lines(said)}")
            try:
                if http.get(url).is_success:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(POLL_SECONDS)
    raise BenchFailed(f"{name} was not ready within {ready_seconds:.0f} s:\n{_last_lines(said)}")


def _last_lines(said: IO[bytes]) -> str:
    said.seek(0)
    return "\n".join(said.read().decode(errors="replace").splitlines()[-20:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it; what it left running in its session goes with it."""
    if process.poll() is None:
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
