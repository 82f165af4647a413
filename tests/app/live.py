"""A real uvicorn server in this process, on a free loopback port and a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import httpx
import uvicorn

from app import serving, startup
from app.http_protocol import BoundedHttp
from app.main import create_app, end_streams
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from fastapi import FastAPI

    from app.gateway import Gateway
    from app.settings import Settings

T = TypeVar("T")
WAIT_SECONDS = 60.0


@dataclass(slots=True)
class Live:
    """The server and a way into its loop, where its state may be read."""

    url: str
    app: FastAPI
    loop: asyncio.AbstractEventLoop
    uvicorn: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        """What a SIGTERM does."""
        self.uvicorn.should_exit = True

    @property
    def gateway(self) -> Gateway:
        return self.app.state.gateway  # type: ignore[no-any-return]

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the server's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_SECONDS)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a state of the server that nothing announces, such as a disconnect having been noticed."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.call(condition):
            assert time.monotonic() < deadline, f"never came true; {self.gateway.manager!r}"
            time.sleep(0.005)

    def granted(self) -> int:
        return self.call(lambda: self.gateway.manager.snapshot().turns.granted)

    def check_idle(self) -> None:
        """Every turn's slots come back, all laws hold, and no branch stays busy."""
        manager, book = self.gateway.manager, self.gateway.book
        self.wait_until(lambda: manager.snapshot().turns.granted == 0)
        self.wait_until(lambda: ", 0 busy" in repr(book))
        self.call(manager.check)
        snapshot = self.call(manager.snapshot)
        assert (snapshot.turns.waiting, snapshot.turns.suspended) == (0, 0)
        hbm = snapshot.tier(Tier.HBM)
        assert (hbm.pinned, hbm.open, hbm.filling, hbm.quarantined) == (0, 0, 0, 0)

    def check_idle_unless_stopped(self) -> None:
        if not self.uvicorn.should_exit:
            self.check_idle()

    def flush(self) -> None:
        """Drop all cached K/V; sessions stay."""
        self.call(self.gateway.manager.flush)


@contextmanager
def live(
    settings: Settings, opened: Callable[[Settings], AbstractAsyncContextManager[Gateway]] = startup.opened
) -> Iterator[Live]:
    """Serve until the block ends; then drain as on SIGTERM. Nothing is kept on disk unless `settings` say where."""
    if "nvme_dir" not in settings.model_fields_set:
        settings = settings.model_copy(update={"nvme_bytes": 0})
    if "cost_gate" not in settings.model_fields_set:
        settings = settings.model_copy(update={"cost_gate": "off"})  # on a busy machine it might well compute again
    app = create_app(settings, opened)
    sock = serving.bind("127.0.0.1", 0)
    started: threading.Event = threading.Event()
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        lifespan="on",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=int(settings.drain_seconds),
    )
    server = _Server(config, started)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="live-server")
    thread.start()
    try:
        assert started.wait(WAIT_SECONDS)
        assert server.started, "start-up failed; see the log"
        assert server.loop is not None
        yield Live(f"http://127.0.0.1:{sock.getsockname()[1]}", app, server.loop, server, thread)
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        sock.close()
    assert not thread.is_alive(), "the server did not stop"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announced: threading.Event) -> None:
        super().__init__(config)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._announced = announced

    async def startup(self, sockets: object = None) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)  # type: ignore[arg-type]
        finally:
            self._announced.set()

    async def shutdown(self, sockets: object = None) -> None:
        end_streams(self.config.app)  # type: ignore[arg-type]  # as app.serving does
        await super().shutdown(sockets)  # type: ignore[arg-type]


def client(server: Live, **options: object) -> httpx.Client:
    """A plain client, for what SDKs hide."""
    return httpx.Client(base_url=server.url, timeout=WAIT_SECONDS, trust_env=False, **options)  # type: ignore[arg-type]
