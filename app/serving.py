"""The process that serves: a port held from the first second, uvicorn, and signals.

SIGTERM, Ctrl-C     before ready: quit at once, nothing was promised yet
                    after: stop accepting, let running turns finish within drain_seconds, exit 0
Ctrl-C again        quit at once
"""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from app.http_protocol import BoundedHttp
from kvstore.errors import SettingInvalid
from models.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import FrameType

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from app.settings import Settings

KEEPALIVE_SECONDS = 65
"""Idle connections; above the 60 s of common proxies and client pools, so that they and not we close first."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening: clients are refused, not kept waiting, while the model loads.

    Raises:
        SettingInvalid: the port is taken or not ours to take, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as exc:
        raise SettingInvalid("--host", f"{host!r} is no address that can be found: {exc}") from exc
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise _refused(host, port, exc) from exc
    return sock


def _refused(host: str, port: int, exc: OSError) -> SettingInvalid:
    match exc.errno:
        case errno.EADDRINUSE:
            return SettingInvalid("--port", f"{port} is in use on {host}; stop what listens there or take another")
        case errno.EACCES:
            return SettingInvalid("--port", f"{port} needs privileges; take one above 1023")
        case _:
            return SettingInvalid("--host", f"cannot listen on {host}: {exc.strerror}")


class GatewayServer(uvicorn.Server):
    """uvicorn, but SIGTERM ends in exit status 0, and a second Ctrl-C in no waiting at all."""

    def __init__(
        self, config: uvicorn.Config, announce: Callable[[], Awaitable[None]], closing: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._announce = announce
        self._closing = closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            await self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Streams that end only when the server does are ended first: turns are waited for, and these are not.
        self._closing()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again once it has drained, and so exit with 143.
        if not self.started or (self.should_exit and sig == signal.SIGINT):
            os._exit(128 + sig)
        self.should_exit = True


class StartupWatch:
    """The app, with a setting or model refused during start-up kept for the caller instead of logged as a crash."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.refusal: SettingInvalid | ModelError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return

        failures: list[Message] = []

        async def hold_failure(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                failures.append(message)
            else:
                await send(message)

        try:
            await self.app(scope, receive, hold_failure)
        except (SettingInvalid, ModelError) as exc:
            self.refusal = exc
            await send({"type": "lifespan.startup.failed", "message": ""})
        except BaseException:
            for message in failures:
                await send(message)
            raise


def nothing() -> None:
    """An app without streams of its own."""


def serve(
    app: ASGIApp,
    sock: socket.socket,
    settings: Settings,
    announce: Callable[[], Awaitable[None]],
    closing: Callable[[], None] = nothing,
) -> None:
    """Serve `app` on `sock` until a signal; `announce` is called once requests are answered, `closing` when it stops.

    Raises:
        SettingInvalid: a setting turned out wrong while the model was loaded.
        ModelError: the model cannot be had, or not be served.
    """
    watch = StartupWatch(app)
    config = uvicorn.Config(
        watch,
        http=BoundedHttp,
        lifespan="on",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=KEEPALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds),
    )
    server = GatewayServer(config, announce, closing)
    try:
        server.run([sock])
    except OSError as exc:
        # Bound is not yet listening: a server that started beside this one may have won meanwhile.
        if server.started or exc.errno != errno.EADDRINUSE:
            raise
        raise _refused(settings.host, settings.port, exc) from exc
    except SystemExit:
        if watch.refusal is not None:
            raise watch.refusal from None
        raise
