"""Signals and start-up of the serving process; each test has one of its own, which cannot outlive it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from app import announce, serving
from app.configuration import load
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).parents[2]
WAIT_SECONDS = 30


@contextmanager
def server(*modes: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.app.serving_process", *modes]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def release(process: subprocess.Popen[str]) -> None:
    """Let what waits on the process's stdin go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_turns_finish_and_exits_with_zero(stop: signal.Signals) -> None:
    with server() as process, httpx.stream("GET", line(process)) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "one"
        process.send_signal(stop)
        release(process)
        assert list(lines) == ["two"]
        assert line(process) == "shut down"
        assert process.wait(WAIT_SECONDS) == 0


def test_a_second_ctrl_c_quits_at_once() -> None:
    with server() as process, httpx.stream("GET", line(process)) as reply:
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)  # it drains: the first signal has been handled
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 130


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_quits_at_once(stop: signal.Signals) -> None:
    with server("load") as process:
        assert line(process) == "loading"
        process.send_signal(stop)
        assert process.wait(WAIT_SECONDS) == 128 + stop


def test_a_setting_refused_while_loading_is_said_without_a_traceback() -> None:
    with server("refuse") as process:
        assert line(process) == "--hbm-bytes: holds nothing"
        assert process.wait(WAIT_SECONDS) == 2
        assert process.stderr is not None
        assert "traceback" not in process.stderr.read().lower()


def test_a_bug_while_loading_keeps_its_traceback() -> None:
    with server("crash") as process:
        assert process.wait(WAIT_SECONDS) == 3
        assert process.stderr is not None
        assert "a long traceback" in process.stderr.read()


def test_a_taken_port_names_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingInvalid, match="is in use") as caught:
        serving.bind("127.0.0.1", taken.getsockname()[1])
    assert caught.value.name == "--port"


def test_a_host_that_does_not_exist_names_its_flag() -> None:
    with pytest.raises(SettingInvalid) as caught:
        serving.bind("no host", 0)
    assert caught.value.name == "--host"


def test_a_port_can_be_taken_again_right_after_a_restart() -> None:
    with serving.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        first.listen()
        with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
            pass
    serving.bind("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::2", "http://[fd00::2]:80"),
    ],
)
def test_the_address_shown_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert announce.base_url(host, 80) == url


@pytest.mark.parametrize(
    ("host", "warns"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("box", True)]
)
def test_a_server_that_others_can_reach_says_that_it_asks_for_no_key(
    host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    announce.settings(load({"host": host}))
    assert ("asks for no key" in caplog.text) == warns


def test_the_first_words_hold_commands_that_can_be_copied() -> None:
    words = announce.hello("http://127.0.0.1:9000", "small")
    assert "curl http://127.0.0.1:9000/v1/chat/completions " in words
    assert '"model": "small"' in words
    assert "`dormouse chat --url http://127.0.0.1:9000`" in words
    assert "`dormouse chat`" in announce.hello("http://127.0.0.1:8000", "small")
