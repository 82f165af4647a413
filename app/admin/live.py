"""The stream behind `/admin`: one producer for all who watch, and only the latest state for each of them.

    pulse     once a second, whether anybody watches or not: how late it is (the event loop's lag), what the store did
    frame     made once a pulse while somebody watches, and only where something has changed or BEAT_SECONDS have passed
    viewer    waits for a frame that it has not sent, sends the latest, waits again

A viewer that reads slowly, or not at all, holds one frame and whatever its socket buffers; nothing is queued for it and
nobody waits for it. The server's end, or `close`, ends all streams.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from starlette.responses import Response

from app import sse
from app.answers import client_gone

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from app.admin.board import Board

PULSE_SECONDS = 1.0
BEAT_SECONDS = 5.0
"""A page that hears nothing for three of these says that the server does not answer."""
LAGS_KEPT = 300
MOST_VIEWERS = 100
"""One more is told to come back: a page left open is no reason to serve turns more slowly."""


class Live:
    """The latest frame, and who waits for the next."""

    def __init__(self, board: Board) -> None:
        self.num_viewers = 0
        self.latest = b""
        self.is_closed = False
        self.lags: deque[float] = deque(maxlen=LAGS_KEPT)
        """Seconds by which the last pulses came late."""
        self._board = board
        self._number = 0
        self._sent_at = 0.0
        self._fresh = asyncio.Event()

    async def run(self) -> None:
        """Pulse until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + PULSE_SECONDS
            await asyncio.sleep(PULSE_SECONDS)
            self.lags.append(max(0.0, clock() - due))
            self.pulse()

    def pulse(self) -> None:
        """What happens once a second."""
        if self.num_viewers:
            self.publish()
        else:
            self._board.tick()

    def publish(self) -> None:
        """Make a frame, where there is something to tell or it has been silent for long."""
        state, now = self._board.take(), time.monotonic()
        number = state["snapshot"]
        assert isinstance(number, int)
        if number == self._number and now - self._sent_at < BEAT_SECONDS:
            return
        self._number, self._sent_at = number, now
        # ASCII: names of models and folders may hold what no UTF-8 can say.
        body = json.dumps(state, separators=(",", ":"))
        self.latest = f"id: {number}\ndata: {body}\n\n".encode("ascii")
        self._wake()

    def close(self) -> None:
        """End every stream; on the event loop."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    async def next_after(self, seen: bytes) -> bytes:
        """The latest frame once it is another than `seen`; empty when there will be none."""
        while self.latest is seen and not self.is_closed:
            await self._fresh.wait()
        return b"" if self.is_closed else self.latest


@asynccontextmanager
async def running(board: Board) -> AsyncIterator[Live]:
    """A stream with its pulse, until the block ends."""
    live = Live(board)
    pulse = asyncio.create_task(live.run())
    try:
        yield live
    finally:
        live.close()
        pulse.cancel()
        with suppress(asyncio.CancelledError):
            await pulse


class Stream(Response):
    """One viewer's answer; the count of viewers goes down when it ends, however that is."""

    def __init__(self, live: Live) -> None:
        super().__init__(headers={**sse.HEADERS, "x-content-type-options": "nosniff"})
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until the viewer goes away or the server ends."""
        headers = [*self.raw_headers, (b"content-type", f"{sse.MEDIA_TYPE}; charset=utf-8".encode())]
        headers = [pair for pair in headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(client_gone(receive))
        sending = asyncio.create_task(self._send_frames(send))
        self._live.num_viewers += 1
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._live.num_viewers -= 1
            gone.cancel()
            sending.cancel()
            await asyncio.wait({gone, sending})

    async def _send_frames(self, send: Send) -> None:
        live, seen = self._live, b""
        live.publish()  # somebody may have watched an hour ago
        await send({"type": "http.response.body", "body": b"retry: 2000\n\n", "more_body": True})
        while frame := (live.latest if not seen else await live.next_after(seen)):
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            seen = frame
            if live.is_closed:
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})
