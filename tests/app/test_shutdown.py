"""What a stopping server does with turns: they finish, or are told that they will not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.types import Tier
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

if TYPE_CHECKING:
    import httpx

Serve = Callable[..., Scripted]
URL = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}


def assert_nothing_is_held(server: Scripted) -> None:
    server.server.thread.join(10)
    manager, book = server.server.gateway.manager, server.server.gateway.book
    manager.check()
    snapshot = manager.snapshot()
    assert (snapshot.turns.granted, snapshot.turns.waiting) == (0, 0)
    assert (snapshot.tier(Tier.HBM).pinned, snapshot.tier(Tier.HBM).open) == (0, 0)
    assert ", 0 busy" in repr(book)


def test_a_running_turn_finishes_while_the_server_stops(serve: Serve) -> None:
    server = serve()
    server.pause()
    with client(server.server) as http, http.stream("POST", URL, json=BODY | {"stream": True}) as response:
        server.server.stop()
        server.go_on()
        assert "data: [DONE]" in list(response.iter_lines())


def test_a_stream_that_does_not_finish_in_time_is_told_so(serve: Serve) -> None:
    server = serve(drain_seconds=0)
    server.pause()
    with client(server.server) as http, http.stream("POST", URL, json=BODY | {"stream": True}) as response:
        server.server.stop()
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert_nothing_is_held(server)


@pytest.mark.parametrize("queued", [False, True])
def test_a_whole_answer_that_does_not_finish_in_time_is_a_503(serve: Serve, queued: bool) -> None:
    server = serve(drain_seconds=0, max_running=1)
    server.pause()
    replies: list[httpx.Response] = []

    def ask() -> None:
        with client(server.server) as http:
            replies.append(http.post(URL, json=BODY))

    threads = [threading.Thread(target=ask) for _ in range(1 + queued)]
    for thread in threads:
        thread.start()
    manager = server.server.gateway.manager
    server.server.wait_until(
        lambda: manager.snapshot().turns.waiting == queued and manager.snapshot().turns.granted == 1
    )
    server.server.stop()
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies] == [503] * len(threads)
    assert all(reply.json()["error"]["code"] == "shutting_down" for reply in replies)
    assert all("retry-after" in reply.headers for reply in replies)
    assert_nothing_is_held(server)


def test_the_stores_own_drain_refuses_new_turns_and_tells_running_ones(serve: Serve) -> None:
    server = serve()
    server.pause()
    live = server.server
    with client(live) as http, http.stream("POST", URL, json=BODY | {"stream": True}) as response:
        asyncio.run_coroutine_threadsafe(live.gateway.manager.drain(0), live.loop).result(10)
        lines = [line for line in response.iter_lines() if line]
        refused = http.post(URL, json=BODY)
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
