"""A client that reads more slowly than the engine speaks: what it has not read is merged, and nothing queues up."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from tests.app.test_cancellation import Call, assert_idle, rounds, running

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Message
    from transformers import PreTrainedTokenizerFast

WORDS = [" one", " two", " three", " four"] * 50
"""An answer of 200 tokens."""


class SlowCall(Call):
    """A client whose connection is full once it has got `free` pieces of the body, until it reads on."""

    def __init__(self, app: FastAPI, free: int) -> None:
        super().__init__(app, stream=True)
        self._free = free
        self.reads_on = asyncio.Event()

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        bodies = sum(message["type"] == "http.response.body" for message in self.sent)
        if bodies >= self._free:
            await self.reads_on.wait()

    @property
    def texts(self) -> list[str]:
        """Of the events that carry any, each as it came."""
        events = b"".join(message.get("body", b"") for message in self.sent).split(b"\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        return [delta["content"] for delta in deltas if delta.get("content")]


async def test_what_a_slow_client_has_not_read_comes_as_one_event(tokenizer: PreTrainedTokenizerFast) -> None:
    async with running(tokenizer, WORDS) as (app, gateway):
        call = SlowCall(app, free=3)
        await rounds(1000)
        assert gateway.manager.snapshot().turns.granted == 0, "the engine has long ended: nobody waits for the client"
        before = len(call.texts)
        call.reads_on.set()
        await call.task
        assert "".join(call.texts) == "".join(WORDS)
        assert len(call.texts) == before + 1, "all that was said meanwhile"
        assert_idle(gateway)
