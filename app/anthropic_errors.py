"""Errors as Anthropic's clients read them, at the URLs of its dialect.

`{"type": "error", "error": {"type", "message"}, "request_id"}`. There is no `param`, so the message
names the place where it does not already.

    429 queue_full                  529 overloaded_error: nobody's limit was reached, the server is busy
    400 context_length_exceeded     begins "prompt is too long", by which Claude Code knows that it must compact
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

if TYPE_CHECKING:
    from app.errors import ErrorReply

URL = "/v1/messages"
OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicErrorDetail(BaseModel):
    """Which kind, and a sentence."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """How the schema describes every reply of this dialect that is no success."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


def is_spoken_at(path: str) -> bool:
    """Whether a URL is one of this dialect."""
    return path == URL or path.startswith(f"{URL}/")


def status(reply: ErrorReply) -> int:
    """The HTTP status."""
    return OVERLOADED if reply.code == "queue_full" else reply.status


def payload(reply: ErrorReply, request_id: str | None) -> bytes:
    """The JSON object, UTF-8."""
    error = {"type": _type(status(reply)), "message": _message(reply)}
    told = {"type": "error", "error": error, "request_id": request_id}
    return json.dumps(told, ensure_ascii=False).encode(errors="replace")


def _type(code: int) -> str:
    return _TYPES.get(code) or ("api_error" if code >= 500 else "invalid_request_error")


def _message(reply: ErrorReply) -> str:
    if reply.code == "context_length_exceeded":
        return f"prompt is too long: {reply.message}"
    if reply.param is None or f"'{reply.param}'" in reply.message:
        return reply.message
    return f"{reply.param}: {reply.message}"
