"""`dormouse top` on what a real server tells, and on what the page's numbers add to it."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from app.top import TopFailed, screen, state_of, top
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

CHECKOUT = Path(__file__).parents[2]
Serve = Callable[..., Scripted]

TOLD = {
    "verdict": {"sentence": "Working: 96% of [bold]history[/bold] reused in the last hour.", "level": "working"},
    "tiles": {
        "1h": [
            {"key": "reused", "label": "History reused", "value": "96%", "detail": "9 of 10 tokens", "tone": "good"}
        ],
        "24h": [
            {"key": "reused", "label": "History reused", "value": "81%", "detail": "8 of 10 tokens", "tone": "bad"}
        ],
    },
    "last_turns": [
        {
            "session": "[red]run/1",
            "turn": 4,
            "prompt_tokens": 4100,
            "reused": {"hbm": 0, "dram": 4064, "nvme": 0},
            "recomputed": 12,
            "woke_from": "dram",
            "first_token_ms": 81.4,
            "miss": "load_timeout",
        }
    ],
}
"""As a server with the page's numbers tells them."""


def shown(state: dict[str, Any], window: str = "1h") -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(screen(state, window))
    return "\n".join(" ".join(line.split()) for line in out.getvalue().splitlines())


def talk(server: Scripted) -> None:
    with client(server.server) as http:
        body = {"model": NAME, "messages": [{"role": "user", "content": "hello there " * 20}], "session_id": "a"}
        for _ in range(2):
            assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_once_shows_tiers_turns_and_what_was_reused(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve()
    talk(server)
    assert top(server.url, None, "1h", 1.0, once=True, as_json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (NAME, "HBM", "History reused", "0 running, 0 waiting", "1 sessions", "2 stop"):
        assert words in said


def test_json_is_the_state_as_the_server_tells_it(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve()
    talk(server)
    assert top(server.url, None, "1h", 1.0, once=True, as_json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    with client(server.server) as http:
        asked = http.get("/admin/api/state").json()
    assert told["turns_ended"] == asked["turns_ended"]
    assert told["turns_ended"]["stop"] == 2


def test_the_pages_verdict_numbers_and_turns_are_shown_as_the_server_words_them(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        state = {**state_of(http), **TOLD}
    said = shown(state)
    assert "Working: 96% of [bold]history[/bold] reused in the last hour." in said
    assert "History reused 96% 9 of 10 tokens" in said
    assert "[red]run/1 4 4,100 4,064 12 DRAM 81 ms load timeout" in said
    assert "History reused 81% 8 of 10 tokens" in shown(state, "24h")


def test_a_failing_disk_and_lost_history_are_said(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        state = dict(state_of(http))
    state["misses"] = {**state["misses"], "evicted": 3, "new_session": 9}
    state["nvme"] = {"health": {"reasons": ["No space left on device"]}}
    said = shown(state)
    assert "disk: No space left on device" in said
    assert "computed again 3 evicted" in said


def test_where_the_page_has_a_key_it_is_asked_for_and_taken(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    key = "0123456789abcdef0123"
    server = serve(admin_key=key)
    assert top(server.url, None, "1h", 1.0, once=True, as_json=True) == 1
    assert "DORMOUSE_CLIENT_KEY" in capsys.readouterr().err
    assert top(server.url, key, "1h", 1.0, once=True, as_json=True) == 0


def test_it_watches_until_it_is_interrupted(serve: Serve) -> None:
    server = serve()
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "dormouse_gateway", "top", "--url", server.url, "--seconds", "0.1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DORMOUSE_")}
    environment["TERM"] = "xterm"
    # A shell that started this suite in the background had it ignore interrupts, and so its children.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdin=theirs, stdout=theirs)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        os.close(theirs)
        # The second time it is not what it began with.
        shown = b""
        while shown.count(b"History reused") < 2:
            shown += os.read(mine, 65536)
        process.send_signal(signal.SIGINT)
        drained = threading.Thread(target=drain, args=(mine,))
        drained.start()
        assert process.wait(60) == 0
        drained.join()
    os.close(mine)


def drain(terminal: int) -> None:
    """Read what a terminal is sent until whoever sent it has gone: nobody ends whose output is not taken."""
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_what_is_no_dormouse_is_said_to_be_none() -> None:
    for answer in (httpx.Response(200, text="nginx"), httpx.Response(200, json=[1]), httpx.Response(404)):
        plain = httpx.MockTransport(lambda request, answer=answer: answer)
        with (
            httpx.Client(transport=plain, base_url="http://server") as http,
            pytest.raises(TopFailed, match="Dormouse"),
        ):
            state_of(http)
