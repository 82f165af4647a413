"""A client that leaves, or a server that cancels, at every single await of a turn: nothing stays held.

The ASGI app runs on the test's own loop with inline threads and a scripted engine, so that "after k rounds of the
loop" names the same place each time.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from app.main import create_app
from app.settings import Settings
from kvstore.types import Tier
from tests.app.conftest import BLOCK_TOKENS, NAME, one_token, scripted_gateway
from tests.app.scripted import ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fastapi import FastAPI
    from starlette.types import Message
    from transformers import PreTrainedTokenizerFast

    from app.gateway import Gateway

ROUNDS = 70
"""More than a turn takes, which the test checks."""


class Inline(Executor):
    """Threads that are none."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@asynccontextmanager
async def running(
    tokenizer: PreTrainedTokenizerFast, words: list[str] | None = None, **options: Any
) -> AsyncIterator[tuple[FastAPI, Gateway]]:
    script = None if words is None else lambda _spec: words
    engine = ScriptedEngine(BLOCK_TOKENS, one_token(tokenizer), script)
    settings = Settings(block_tokens=BLOCK_TOKENS, **options)
    gateway = scripted_gateway(settings, engine, tokenizer, 64, 512, Inline())

    @asynccontextmanager
    async def opened(_settings: Settings) -> AsyncIterator[Gateway]:
        yield gateway

    app = create_app(settings, opened)
    async with app.router.lifespan_context(app):
        yield app, gateway


class Call:
    """One request, sent straight into the app; the client leaves when `leave` is called."""

    def __init__(self, app: FastAPI, stream: bool) -> None:
        body = {"model": NAME, "messages": [{"role": "user", "content": "hello " * 20}], "stream": stream}
        self._unread: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._gone = asyncio.Event()
        self.sent: list[Message] = []
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._gone.set()

    @property
    def is_whole(self) -> bool:
        last = self.sent[-1] if self.sent else {"type": "nothing"}
        return last["type"] == "http.response.body" and not last.get("more_body", False)

    async def _receive(self) -> Message:
        if self._unread:
            return self._unread.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        await asyncio.sleep(0)


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def assert_idle(gateway: Gateway) -> None:
    gateway.manager.check()
    snapshot = gateway.manager.snapshot()
    assert (snapshot.turns.granted, snapshot.turns.waiting, snapshot.turns.suspended) == (0, 0, 0)
    hbm = snapshot.tier(Tier.HBM)
    assert (hbm.pinned, hbm.open, hbm.filling) == (0, 0, 0)
    assert ", 0 busy" in repr(gateway.book)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["the client leaves", "the server cancels"])
async def test_leaving_at_any_await_gives_everything_back(
    tokenizer: PreTrainedTokenizerFast, stream: bool, how: str
) -> None:
    async with running(tokenizer) as (app, gateway):
        for count in range(ROUNDS):
            call = Call(app, stream)
            await rounds(count)
            was_whole = call.is_whole
            if how == "the client leaves":
                call.leave()
            else:
                call.task.cancel()
            await asyncio.wait({call.task}, timeout=10)
            assert call.task.done()
            assert call.task.cancelled() or call.task.exception() is None
            assert_idle(gateway)
        assert was_whole, "the last round should come after the whole answer"


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue_at_any_await_gives_everything_back(
    tokenizer: PreTrainedTokenizerFast, stream: bool
) -> None:
    async with running(tokenizer, max_running=1) as (app, gateway):
        for count in range(40):
            calls = [Call(app, stream) for _ in range(3)]
            await rounds(count)
            calls[1].leave()
            calls[2].task.cancel()
            await asyncio.wait({call.task for call in calls}, timeout=10)
            assert calls[0].is_whole
            assert_idle(gateway)
