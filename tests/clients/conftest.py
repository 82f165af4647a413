"""One real server for all tests of public clients: the command a user types, the embedded model, a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[2]
READY_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Server:
    """A running `dormouse serve`; `words` is what it said of itself until it was ready."""

    url: str
    words: str


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DORMOUSE_")}
    command = [sys.executable, "-m", "dormouse_gateway", "serve", "--port", "0", "--hbm-bytes", "256MiB"]
    command += ["--nvme-bytes", "0"]  # what tests say is nobody's to keep
    with subprocess.Popen(command, cwd=CHECKOUT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(READY_SECONDS, process.kill)
        watchdog.start()
        try:
            ready = _ready(process)
            watchdog.cancel()
            yield ready
            process.send_signal(signal.SIGTERM)
            assert process.wait(READY_SECONDS) == 0
        finally:
            watchdog.cancel()
            process.kill()


def _ready(process: subprocess.Popen[str]) -> Server:
    assert process.stderr is not None
    words = ""
    for line in process.stderr:
        words += line
        if "Ctrl-C stops the server" in line:
            # A pipe that nobody reads would stop the server once it is full.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return Server(re.findall(r"answers at (\S+)/v1 ", words)[0], words)
    raise AssertionError(f"the server ended before it was ready:\n{words}")
