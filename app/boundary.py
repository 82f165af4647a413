"""The outermost layers of a request: its id, the last resort when something raised, the limit of its body.

Plain ASGI, so that a response's `receive` still sees the client leave (BaseHTTPMiddleware hides it).
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import TYPE_CHECKING

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders

from app import anthropic_errors
from app.errors import INTERNAL, ErrorReply

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("dormouse.http")

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"
"""Where Anthropic's clients look for it."""

MAX_BODY_BYTES = 32 * 1024**2
"""Far above the text of any context that fits; a conversation of a million tokens is some 5 MB."""


GIVEN_ID = re.compile(r"[!-~]{1,128}")
"""What a client or a proxy may call its request: it is echoed in a header and stands in log lines."""


class RequestIds:
    """Every response, errors included, carries an `x-request-id`: the request's own, or one of ours. SDKs print it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if anthropic_errors.is_spoken_at(scope["path"]):
                    headers[ANTHROPIC_REQUEST_ID] = request_id
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


class BodyLimit:
    """A body is read into memory whole, so there is a most of it; told by its length, or counted as it comes."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self.max_bytes:
            await self._refusal().response()(scope, receive, send)
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, self._refusal().message)
            return message

        await self.app(scope, receive_counted, send)

    def _refusal(self) -> ErrorReply:
        return ErrorReply(413, f"The request body is larger than {self.max_bytes} bytes.", code="body_too_large")
