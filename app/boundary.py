"""The outermost layer of a request: its id, and the last resort when something raised.

Plain ASGI, so that a response's `receive` still sees the client leave (BaseHTTPMiddleware hides it).
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

from app.errors import INTERNAL

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("dormouse.http")

REQUEST_ID = "x-request-id"


class RequestIds:
    """Every response, errors included, carries an `x-request-id` of ours; SDKs print it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class LastResort:
    """An exception nobody translated is logged with the request's id and leaves as a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_watched)
        except Exception:
            request_id = scope.get("state", {}).get("request_id", "-")
            logger.exception("unhandled error in %s %s (%s)", scope["method"], scope["path"], request_id)
            if started:
                # Half a response is out: only a torn connection tells the client that the rest will not come.
                raise
            await INTERNAL.response()(scope, receive, send)
