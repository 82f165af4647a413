"""The stream behind /admin: one state for all who watch, the latest only, and what it costs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from app.admin.live import MOST_VIEWERS
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

if TYPE_CHECKING:
    import httpx

    from app.admin.live import Live

Serve = Callable[..., Scripted]


def say(http: httpx.Client, session_id: str, **fields: object) -> None:
    text = "hello there, little one " * 8
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "session_id": session_id, **fields}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def live_of(server: Scripted) -> Live:
    live: Live = server.server.app.state.live
    return live


def state_in(event: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.removeprefix("data: "))
    return found


def test_whoever_watches_has_the_state_at_once_and_again_when_it_has_changed(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http, client(server.server) as other:
        say(other, "a")
        with http.stream("GET", "/admin/api/events") as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["x-accel-buffering"] == "no"
            events = (line for line in response.iter_lines() if line.startswith("data: "))
            first = state_in(next(events))
            assert first["sessions"] == 1
            say(other, "b")
            second = state_in(next(events))
        assert second["sessions"] == 2
        assert second["snapshot"] > first["snapshot"]
        told = other.get(f"/admin/api/state?snapshot={second['snapshot']}").json()
        assert told == {**second, "at": told["at"], "uptime_seconds": told["uptime_seconds"]}
    server.server.wait_until(lambda: live_of(server).num_viewers == 0)


def test_the_same_number_tells_the_same_numbers_and_a_change_another(serve: Serve) -> None:
    with client(serve().server) as http:
        say(http, "a")
        first, again = (http.get("/admin/api/state").json() for _ in range(2))
        assert {**first, "at": 0, "uptime_seconds": 0} == {**again, "at": 0, "uptime_seconds": 0}
        scraped = next(line for line in http.get("/metrics").text.splitlines() if line.startswith("dormouse_snapshot "))
        assert float(scraped.split()[1]) == first["snapshot"]
        say(http, "a")
        assert http.get("/admin/api/state").json()["snapshot"] > first["snapshot"]
        assert http.get(f"/admin/api/state?snapshot={first['snapshot']}").json()["sessions"] == 1
        assert http.get("/admin/api/state?snapshot=99999").json()["error"]["code"] == "snapshot_not_kept"


def test_a_stalled_viewer_holds_one_frame_and_keeps_nobody_waiting(serve: Serve) -> None:
    """Ten thousand states pass a viewer that reads nothing: what is kept for it does not grow."""
    server = serve()
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as stalled, client(server.server) as http:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(b"GET /admin/api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        live = live_of(server)
        server.server.wait_until(lambda: live.num_viewers == 1)
        say(http, "a")
        server.server.call(live.publish)

        def many_frames() -> None:
            for number in range(10_000):
                live.latest = b"data: " + b"x" * 10_000 + str(number).encode() + b"\n\n"
                live._wake()

        server.server.call(many_frames)
        say(http, "b")
        assert server.server.call(lambda: live.num_viewers) == 1
        stalled.settimeout(5.0)
        received = 0
        server.server.call(live.close)
        while chunk := stalled.recv(65536):
            received += len(chunk)
        # Of 100 MB that passed: its socket's buffers and the writer's, and the last frame.
        assert received < 8 * 1024**2


def test_a_frame_costs_less_than_a_hundredth_of_a_core_a_second_however_many_watch(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        for number in range(30):
            say(http, f"s{number}")
    live, board = live_of(server), server.server.gateway.board

    def cost() -> float:
        live.publish()
        started = time.thread_time()
        for _ in range(20):
            # Something has changed each time: the whole state is made, compared and written as JSON.
            board.prefetches.given(("", "x", 0), 0.0)
            board.tick()
            live.publish()
        return (time.thread_time() - started) / 20

    costs = [server.server.call(cost) for _ in range(3)]
    assert min(costs) < 0.010, costs


def test_the_server_ends_its_streams_before_it_waits_for_turns(serve: Serve) -> None:
    server = serve(drain_seconds=30)
    with client(server.server) as http, http.stream("GET", "/admin/api/events") as response:
        lines = response.iter_lines()
        assert next(lines) == "retry: 2000"
        started = time.monotonic()
        server.server.stop()
        for _ in lines:
            pass
        server.server.thread.join(10)
        assert not server.server.thread.is_alive()
        assert time.monotonic() - started < 10


def test_more_pages_than_are_worth_it_are_told_to_come_back(serve: Serve) -> None:
    server = serve()
    live = live_of(server)
    with client(server.server) as http, ExitStack() as stack:
        server.server.call(lambda: setattr(live, "num_viewers", MOST_VIEWERS))
        stack.callback(lambda: setattr(live, "num_viewers", 0))
        refused = http.get("/admin/api/events")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_viewers"


@pytest.mark.parametrize("window", ["15m", "1h", "24h"])
def test_the_history_has_first_tokens_and_misses_over_time(serve: Serve, window: str) -> None:
    with client(serve().server) as http:
        say(http, "a")
        say(http, "a")
        history = http.get(f"/admin/api/history?window={window}").json()
        assert http.get("/admin/api/history?window=1y").status_code == 400
    points = len(history["at"])
    assert points >= 12
    assert all(len(values) == points for values in history["first_token_p50"].values())
    assert all(len(values) == points for values in history["misses"].values())
    assert "new_session" not in history["misses"]


def test_windows_of_a_young_server_say_since_when(serve: Serve) -> None:
    with client(serve().server) as http:
        say(http, "a")
        state = http.get("/admin/api/state").json()
    for window in state["windows"].values():
        assert window["is_since_start"] is True
        assert abs(window["since"] - state["at"]) < 120
        assert window["turns"] == 1
    assert [len(tiles) for tiles in state["tiles"].values()] == [10, 10, 10]
    assert state["last_turns"][0]["session"] == "a"


def test_health_tells_lag_queues_and_settings_but_no_secret(serve: Serve) -> None:
    from pydantic import SecretStr

    server = serve(admin_key=SecretStr("a-secret-that-is-long"), hf_token=SecretStr("hf_secret"))
    server.server.call(lambda: live_of(server).lags.append(0.002))
    with client(server.server, headers={"authorization": "Bearer a-secret-that-is-long"}) as http:
        response = http.get("/admin/api/health")
    told = response.json()
    assert told["lag"]["worst_ms"] >= 2.0
    assert told["queues"]["turns in the queue"] == 0
    assert told["disk"] is None
    settings = {each["name"]: each for each in told["settings"]}
    assert settings["--block-tokens"]["is_default"] is False
    assert settings["--max-queue"] == {"heading": "Engine", "name": "--max-queue", "value": "1024", "is_default": True}
    assert "secret" not in response.text
