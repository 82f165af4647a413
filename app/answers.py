"""The two shapes of an answer, whole and streamed, as ASGI responses that own their turns.

A response here holds its exchange from before the first lease is asked for until every slot is back:

    __call__ ── work: acquire the lease ─ pieces ─ record ─ last bytes
             └─ watch: http.disconnect
    finally: cancel both, then `exchange.close()`, shielded

The first of the two to end ends both, so a client that goes away stops its turns at the next step. Nothing is
left to a generator's `finally`, which runs when the garbage collector likes (sglang-omni #1080, sse-starlette #156).
No byte is sent before the lease is there, so a refusal has its real status; only a stream that would be silent for
`keepalive_seconds` begins before, and tells a later refusal as an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.responses import Response

from app import sse
from app.errors import INTERNAL, reply_for
from kvstore.errors import ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from starlette.types import Message, Receive, Scope, Send

    from app.exchange import Exchange
    from app.form import Form

logger = logging.getLogger("dormouse.http")

GOODBYE_SECONDS = 1.0


class TurnAnswer(Response):
    """An answer that owns `exchange`; `form` says how its bytes look."""

    def __init__(self, exchange: Exchange, form: Form) -> None:
        super().__init__(headers={"x-session-id": exchange.session_id})
        self.exchange = exchange
        self.form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the turns and send their answer; returns, or raises, only when every slot is back."""
        work = asyncio.create_task(self.answer(scope, receive, send))
        watch = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.exchange.dismiss()  # by the server, whose time to drain is over; the client is still there
            raise
        finally:
            await _shielded(self._end(work, watch))
        if work.done() and not work.cancelled():
            work.result()

    async def _end(self, work: asyncio.Task[None], watch: asyncio.Task[None]) -> None:
        work.cancel()
        watch.cancel()
        await asyncio.wait({work, watch})
        await self.exchange.close()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Produce the answer; cancelled when the client goes away or the server does."""
        raise NotImplementedError


async def _say_goodbye(saying: Awaitable[None]) -> None:
    """Send a last word, but not to a client that reads too slowly to hear it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await saying


class WholeAnswer(TurnAnswer):
    """One object, sent when the last turn has ended."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect the pieces; an error leaves with its own status, since nothing was sent."""
        try:
            async for piece in self.exchange.pieces():
                self.form.take(piece, self.exchange)
        except asyncio.CancelledError:
            if self.exchange.is_dismissed:
                await _say_goodbye(reply_for(ShuttingDown()).response()(scope, receive, send))
            raise
        body = json.dumps(self.form.whole(self.exchange), ensure_ascii=False).encode()
        headers = {"x-session-id": self.exchange.session_id}
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)


class StreamedAnswer(TurnAnswer):
    """Server-sent events."""

    def __init__(self, exchange: Exchange, form: Form, keepalive_seconds: float) -> None:
        super().__init__(exchange, form)
        self._keepalive_seconds = keepalive_seconds

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the pieces; once bytes are out, a failure becomes the last event."""
        wire = Wire(send, {**sse.HEADERS, "x-session-id": self.exchange.session_id})
        comments = asyncio.create_task(wire.keep_alive(self._keepalive_seconds, self.form.keep_alive))
        try:
            await self._stream(wire)
        except asyncio.CancelledError:
            if self.exchange.is_dismissed:
                await _say_goodbye(wire.write(self.form.failure(reply_for(ShuttingDown()))))
                await _say_goodbye(wire.end())
            raise
        except Exception as error:
            if not wire.started:
                raise
            reply = reply_for(error)
            if reply is INTERNAL:
                logger.exception("a stream failed")
            await wire.write(self.form.failure(reply))
        finally:
            comments.cancel()
            with suppress(asyncio.CancelledError):
                await comments
        await wire.end()

    async def _stream(self, wire: Wire) -> None:
        async for piece in self.exchange.pieces():
            data = self.form.chunk(piece, self.exchange)
            if self.exchange.is_over:
                data += self.form.ending(self.exchange)
            if data:
                await wire.write(data)


class Wire:
    """The body of one streamed response: begins with the first bytes, and knows how long it has been silent."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        pairs = {"content-type": f"{sse.MEDIA_TYPE}; charset=utf-8", **headers}
        raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
        self._start: Message = {"type": "http.response.start", "status": 200, "headers": raw}
        self._turn_to_send = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()
        self.started = False

    async def write(self, data: bytes) -> None:
        """Send `data`, after the headers where it is the first."""
        async with self._turn_to_send:
            if not self.started:
                await self._send(self._start)
                self.started = True
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._last = self._clock()

    async def end(self) -> None:
        """Send the end of the body."""
        async with self._turn_to_send:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, seconds: float, sign: bytes) -> None:
        """A `sign` of life whenever nothing was sent for `seconds`; runs until cancelled."""
        while True:
            left = self._last + seconds - self._clock()
            if left <= 0:
                await self.write(sign)
            else:
                await asyncio.sleep(left)


async def client_gone(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _shielded(ending: Coroutine[None, None, None]) -> None:
    """Run `ending` to its end whatever is cancelled meanwhile; a cancellation is passed on after it."""
    task = asyncio.ensure_future(ending)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
