"""A real server that is killed between turns: what was written is woken from NVMe, what was not is computed again.

Three lives of one directory. Every text is that of a conversation in the same words that no kill came between.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[2]
READY_SECONDS = 120.0
BLOCK_TOKENS = 32
USERS = (
    "Tell me of {name}, of mice, and of how they sleep through the winter. " * 8,
    "And then, when the snow is gone, where does {name} go? " * 3,
)


class Server:
    """`dormouse serve` in a process of its own, over HTTP."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._model = http.get("/v1/models").json()["data"][0]["id"]

    def say(self, session: str, name: str, texts: list[str]) -> tuple[str, dict[str, Any]]:
        """The turn after the answers in `texts`: what is answered, and its `session` object."""
        messages = []
        for user, text in zip(USERS, texts, strict=False):
            messages += [{"role": "user", "content": user.format(name=name)}, {"role": "assistant", "content": text}]
        messages.append({"role": "user", "content": USERS[len(texts)].format(name=name)})
        body = {
            "model": self._model,
            "messages": messages,
            "session_id": session,
            "cache_salt": session,
            "max_tokens": 16,
            "temperature": 0.0,
        }
        response = self._http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        told = response.json()
        return told["choices"][0]["message"]["content"], told["session"]

    def wait_until_clean(self) -> None:
        """Until the state shows nothing that is still to be written."""
        deadline = time.monotonic() + READY_SECONDS
        while self.dirty_blocks:
            assert time.monotonic() < deadline, "never written"
            time.sleep(0.01)

    @property
    def dirty_blocks(self) -> int:
        count: int = self._http.get("/admin/api/state").json()["dirty_blocks"]
        return count


@contextmanager
def killed_at_the_end(root: Path, cache_dir: Path, port: int, policy: str) -> Iterator[Server]:
    """A server on the directory until the block ends; then SIGKILL."""
    command = [sys.executable, "-m", "dormouse_gateway", "serve", "--port", str(port), "--dtype", "bf16"]
    command += ["--nvme-dir", str(root / "nvme"), "--nvme-bytes", "512MiB", "--nvme-write-policy", policy]
    command += ["--hbm-bytes", "256MiB", "--dram-bytes", "64MiB", "--cost-gate", "off", "--cache-dir", str(cache_dir)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DORMOUSE_")}
    with (root / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=CHECKOUT, env=clean, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=READY_SECONDS, trust_env=False) as http:
            _wait_until_ready(http, process, root / "log")
            yield Server(http)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _wait_until_ready(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)


@pytest.mark.usefixtures("exact_machine")
def test_a_killed_servers_sessions_go_on_from_nvme_or_say_that_they_were_not_written(
    tmp_path: Path, cache_dir: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
    with killed_at_the_end(tmp_path, cache_dir, port, "every-turn") as server:
        first, _ = server.say("written", "Anna", [])
        server.wait_until_clean()
    with killed_at_the_end(tmp_path, cache_dir, port, "on-pressure") as server:
        second, woken = server.say("written", "Anna", [first])
        assert woken["woke_from"] == "nvme"
        assert woken["reused_tokens"]["nvme"] > 4 * BLOCK_TOKENS
        assert woken["recomputed_tokens"] < BLOCK_TOKENS
        assert (woken["turn"], woken["miss_reason"]) == (2, None)
        third, _ = server.say("unwritten", "Bertha", [])
        assert server.dirty_blocks > 0
    with killed_at_the_end(tmp_path, cache_dir, port, "on-pressure") as server:
        fourth, missed = server.say("unwritten", "Bertha", [third])
        assert (missed["turn"], missed["miss_reason"], missed["woke_from"]) == (2, "not_written", None)
        assert missed["recomputed_tokens"] > 4 * BLOCK_TOKENS
        for name, told in (("Anna", [first, second]), ("Bertha", [third, fourth])):
            never_killed: list[str] = []
            for _ in told:
                never_killed.append(server.say(f"control-{name}", name, never_killed)[0])
            assert told == never_killed
