"""The examples, as a reader runs them, against a real server on the tiny model."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.server import serving, settings

if TYPE_CHECKING:
    from tests.faults.server import Server

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 120
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
"""The suite's own would have a slow callback of the example's told on stderr."""


def run(server: Server, name: str, *arguments: str) -> str:
    """What an example says on stdout; it must end well and say nothing on stderr."""
    command = [sys.executable, str(EXAMPLES / name), "--url", server.live.url, *arguments]
    got = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (got.returncode, got.stderr) == (0, ""), got.stdout + got.stderr
    return got.stdout


def test_every_example_is_told_of_and_run() -> None:
    told = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert told == {path.name for path in EXAMPLES.glob("*.py")}
    run_here = (ROOT / "tests/docs/test_examples.py").read_text()
    run_there = (ROOT / "tests/clients/test_langchain_example.py").read_text()
    assert all(f'"{name}"' in run_here + run_there for name in told)


def test_an_agent_calls_its_tools_and_reuses_its_history(server: Server) -> None:
    said = run(server, "agent_with_tools.py")
    assert len(re.findall(r"^    (weather|winter_sleep)\(\{.*\}\) -> .+$", said, re.MULTILINE)) >= 2
    turns = re.findall(r"^  turn (\d+): (\d+) tokens reused", said, re.MULTILINE)
    assert [int(turn) for turn, _ in turns] == list(range(1, len(turns) + 1))
    assert len(turns) >= 4
    assert all(int(reused) > 0 for turn, reused in turns if int(turn) > 1)


def test_a_hundred_sessions_talk_at_once_and_none_is_computed_again(tiny_model: Path, tmp_path: Path) -> None:
    """More than HBM holds: most of them sleep between their turns."""
    with serving(settings(tiny_model, tmp_path / "nvme", hbm_bytes=2**20, dram_bytes=2 * 2**20)) as server:
        said = run(server, "hundred_sessions.py", "--sessions", "100", "--turns", "2", "--tokens", "4")
        assert re.findall(r"^turn (\d): 100 answers", said, re.MULTILINE) == ["1", "2"]
        assert "misses {'new_session': 100}" in said.splitlines()[0]
        assert "misses {}" in said.splitlines()[1]
        assert "from dram" in said.splitlines()[1]
        server.check_sound()


def test_the_first_key_wakes_the_session_before_the_message_is_sent(server: Server) -> None:
    mine, theirs = pty.openpty()
    command = [sys.executable, str(EXAMPLES / "typing_indicator.py"), "--url", server.live.url]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT) as process:
        os.close(theirs)
        said = read_until(mine, "> ")
        os.write(mine, b"Tell me of mice, and of how they sleep, and where, and for how long, and why.\r")
        said += read_until(mine, "woke from None, by None]\r\n> ")
        os.write(mine, b"A")
        # Nothing has been sent yet, and it is on its way, or there already.
        said += read_until(mine, "] A")
        os.write(mine, b"nd x\x7fwhy?\r")
        said += read_until(mine, "]\r\n> ")
        os.write(mine, b"\x04")
        assert process.wait(SECONDS) == 0
    os.close(mine)
    assert re.search(r"\[(waking|awake)\] A", said)
    assert said.endswith("[woke from dram, by hint]\r\n> "), said


def read_until(terminal: int, end: str) -> str:
    """What the terminal shows until it ends with `end`."""
    shown = ""
    while not shown.endswith(end):
        piece = os.read(terminal, 4096).decode()
        assert piece
        shown += piece
    return shown
