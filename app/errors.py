"""What a client is told when something is refused or fails: always one error object, and OpenAI's unless the URL is
of a dialect that has its own (anthropic_errors.py).

    ApiError                        raised by this package
    ├── InvalidRequest              400 invalid_request_error, names its `param`
    ├── ModelNotFound               404 model_not_found
    └── NotReady                    503, with Retry-After

    kvstore.errors and models.errors are translated by `TABLE`, once, here. What no row
    covers is a 500 that says nothing of the inside.

`{"error": {"message", "type", "param", "code"}}`, all four keys always there: SDKs read them, and
FastAPI's own `{"detail": ...}` would lose the message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app import anthropic_errors
from kvstore.errors import (
    ContextTooLong,
    QueueFull,
    SessionEmpty,
    SessionTaken,
    SessionUnknown,
    SettingInvalid,
    ShuttingDown,
    StoreError,
    TurnFailed,
)
from models.errors import ModelError, TemplateFailed

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.types import Receive, Scope, Send

INVALID = "invalid_request_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it leaves: HTTP status and the four keys. `retry_after_seconds` None sends no Retry-After."""

    status: int
    message: str
    type: str = INVALID
    code: str | None = None
    param: str | None = None
    retry_after_seconds: float | None = None

    def payload(self) -> bytes:
        """The JSON object, UTF-8."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode(errors="replace")

    def headers(self) -> dict[str, str]:
        """Both spellings of the wait: proxies read the first, the OpenAI SDK prefers the second."""
        if self.retry_after_seconds is None:
            return {}
        seconds = max(self.retry_after_seconds, 0.0)
        return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(round(seconds * 1000))}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The whole HTTP response."""
        return ErrorResponse(self, {**(headers or {}), **self.headers()})


class ErrorResponse(Response):
    """An error on its way, which takes its form when it is known to whom it goes: by then no layer can forget it."""

    def __init__(self, reply: ErrorReply, headers: Mapping[str, str]) -> None:
        super().__init__(reply.payload(), reply.status, headers=headers, media_type="application/json")
        self._reply = reply
        self._given = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if anthropic_errors.is_spoken_at(scope["path"]):
            payload = anthropic_errors.payload(self._reply, scope.get("state", {}).get("request_id"))
            status = anthropic_errors.status(self._reply)
            response = Response(payload, status, headers=self._given, media_type="application/json")
            await response(scope, receive, send)
            return
        await super().__call__(scope, receive, send)


class ErrorDetail(BaseModel):
    """OpenAI's four keys."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(BaseModel):
    """How the schema describes every reply that is no success."""

    error: ErrorDetail


class ApiError(Exception):
    """Root of this package's refusals; carries its reply."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


class InvalidRequest(ApiError):
    """The request cannot be honoured as it stands; `param` says which part."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(ErrorReply(400, message, param=param, code=code))


class ModelNotFound(ApiError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        known = ", ".join(f"'{one}'" for one in served)
        message = (
            f"The model '{name}' is not served here; this server answers to {known}. "
            f"Use one of these, or start the server with --served-model-name."
        )
        super().__init__(ErrorReply(404, message, code="model_not_found", param="model"))


class NotReady(ApiError):
    """The model is still loading, or the server drains."""

    def __init__(self, message: str, code: str, retry_after_seconds: float) -> None:
        reply = ErrorReply(503, message, SERVER, code=code, retry_after_seconds=retry_after_seconds)
        super().__init__(reply)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one lower-layer error reaches the client; `message` None means the error's own sentence does."""

    status: int
    type: str
    code: str
    param: str | None = None
    message: str | None = None


TABLE: dict[type[Exception], Rule] = {
    QueueFull: Rule(429, "rate_limit_error", "queue_full"),
    ContextTooLong: Rule(400, INVALID, "context_length_exceeded", "messages"),
    ShuttingDown: Rule(503, SERVER, "shutting_down"),
    SessionUnknown: Rule(404, INVALID, "session_not_found", "session_id"),
    SessionTaken: Rule(409, INVALID, "session_exists", "session_id"),
    SessionEmpty: Rule(409, INVALID, "session_empty", "session_id"),
    TurnFailed: Rule(
        500,
        SERVER,
        "turn_failed",
        message="The engine failed while computing this turn; the session keeps what it had before. Retry the request.",
    ),
    # A setting is checked before serving; one that fails later is our fault and not the client's.
    SettingInvalid: Rule(500, SERVER, "internal_error", message="The server met an internal error."),
    StoreError: Rule(500, SERVER, "internal_error", message="The server met an internal error."),
    TemplateFailed: Rule(400, INVALID, "invalid_value", "messages"),
    ModelError: Rule(500, SERVER, "internal_error", message="The server met an internal error."),
}

INTERNAL = ErrorReply(500, "The server met an internal error.", SERVER, code="internal_error")


def reply_for(error: BaseException) -> ErrorReply:
    """The reply for any exception; the most specific row of TABLE wins, and without one it is `INTERNAL`."""
    if isinstance(error, ApiError):
        return error.reply
    for kind in type(error).__mro__:
        rule = TABLE.get(kind)
        if rule is not None:
            wait = getattr(error, "retry_after_seconds", None)
            return ErrorReply(rule.status, rule.message or str(error), rule.type, rule.code, rule.param, wait)
    return INTERNAL


def reply_for_validation(error: RequestValidationError) -> ErrorReply:
    """The first thing wrong with a request body, named the way OpenAI names it: `messages[0].content`."""
    first: Mapping[str, Any] = next(iter(error.errors()), {})
    context: Mapping[str, Any] = first.get("ctx") or {}
    param = _param(first.get("loc", ()), context.get("param"))
    kind = str(first.get("type", ""))
    code = str(context["code"]) if "code" in context else None
    if kind == "json_invalid":
        return ErrorReply(400, f"The request body is not valid JSON: {context.get('error', 'parse error')}.")
    if param is None and kind in {"model_attributes_type", "model_type", "dict_type", "missing"}:
        return ErrorReply(400, "The request body must be a JSON object, sent as application/json.")
    if kind == "missing":
        return ErrorReply(
            400, f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param
        )
    if context.get("whole"):
        return ErrorReply(400, str(first.get("msg")), code=code, param=param)
    return ErrorReply(400, f"Invalid '{param}': {_sentence(first)}", code=code or "invalid_value", param=param)


def _sentence(first: Mapping[str, Any]) -> str:
    text = str(first.get("msg", "invalid value"))
    return text[:1].lower() + text[1:] + "."


def _param(loc: Sequence[object], inner: object) -> str | None:
    """('body', 'messages', 0, 'content') -> 'messages[0].content'; `inner` is what a validator adds itself."""
    text = ""
    for part in [*loc[1:], *([inner] if inner else [])]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif str(part).startswith("["):
            text += str(part)
        else:
            text += f".{part}" if text else str(part)
    return text or None


def reply_for_http(request: Request, error: HTTPException) -> ErrorReply:
    """Routing's own refusals: unknown URL, wrong method, a body that could not be parsed."""
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            return ErrorReply(404, f"Unknown URL ({where}).", code="unknown_url")
        case 405:
            return ErrorReply(405, f"Method not allowed ({where}).", code="method_not_allowed")
        case 413:
            return ErrorReply(413, str(error.detail), code="body_too_large")
        case status if status < 500:
            return ErrorReply(status, str(error.detail))
    return INTERNAL


def install(app: FastAPI) -> None:
    """Have every error of `app` leave as an error object."""

    async def on_validation(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return reply_for_validation(error).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return reply_for_http(request, error).response(error.headers)

    async def on_known(_request: Request, error: Exception) -> Response:
        return reply_for(error).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    known: tuple[type[Exception], ...] = (ApiError, *TABLE)
    for kind in known:
        app.add_exception_handler(kind, on_known)
