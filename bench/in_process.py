"""A gateway behind the HTTP server that `dormouse serve` has, on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import uvicorn

from app import serving
from app.http_protocol import BoundedHttp
from app.main import create_app

if TYPE_CHECKING:
    import socket

    from app.gateway import Gateway
    from app.settings import Settings


def server_loop() -> asyncio.Runner:
    """A runner of the kind of event loop that uvicorn chooses here."""
    return asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory())


@asynccontextmanager
async def served(settings: Settings, gateway: Gateway) -> AsyncIterator[tuple[str, int]]:
    """Where `gateway` answers: loopback and a free port. Options are those of `app.serving`."""
    app = create_app(settings, lambda _: contextlib.nullcontext(gateway))
    started = asyncio.Event()
    config = uvicorn.Config(
        app, http=BoundedHttp, lifespan="on", log_config=None, access_log=False, ws="none", timeout_keep_alive=65
    )
    server = _Server(config, started)
    with serving.bind("127.0.0.1", 0) as sock:
        task = asyncio.create_task(server.serve([sock]))
        try:
            await started.wait()
            host, port = sock.getsockname()[:2]
            yield str(host), int(port)
        finally:
            server.should_exit = True
            await task


class _Server(uvicorn.Server):
    """Says when it answers, and leaves signals to the benchmark."""

    def __init__(self, config: uvicorn.Config, answers: asyncio.Event) -> None:
        super().__init__(config)
        self._answers = answers

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._answers.set()
