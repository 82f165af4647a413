"""What a newcomer types in the first ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.clients.conftest import CHECKOUT

if TYPE_CHECKING:
    from tests.clients.conftest import Server


def test_the_curl_line_that_the_server_prints_works_as_it_stands(server: Server) -> None:
    (line,) = [line.strip() for line in server.words.splitlines() if line.strip().startswith("curl ")]
    got = subprocess.run(["bash", "-c", f"{line} --silent"], capture_output=True, text=True, timeout=60, check=True)
    reply = json.loads(got.stdout)
    assert reply["choices"][0]["message"]["content"]
    assert reply["session"]["turn"] == 1


def test_dormouse_chat_reads_turns_from_a_pipe_and_shows_the_last_session(server: Server) -> None:
    command = [sys.executable, "-m", "dormouse_gateway", "chat", "--url", server.url, "--session", "piped"]
    typed = "Say hello.\nSay it again, please.\n/stats\n"
    got = subprocess.run(command, cwd=CHECKOUT, input=typed, capture_output=True, text=True, timeout=120, check=True)
    assert got.stdout.strip()
    stats = json.loads(got.stderr)
    assert stats["session"]["id"] == "piped"
    assert stats["session"]["turn"] == 2
    assert stats["session"]["miss_reason"] is None
