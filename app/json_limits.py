"""JSON that parsers take and nothing behind them can: refused with the name of the parameter, before any route.

    too deep           a list in a list in a list ...: whatever walks it later would run out of stack
    NaN, Infinity      Python reads them, JSON has no such numbers
    half a surrogate   "\\ud800" is legal JSON and no Unicode: neither a tokenizer nor UTF-8 can take it
    NUL                "\\u0000" ends a string in C, and so in libraries that texts and ids are handed to

The bytes are searched first. What has few brackets and none of these signs, as most bodies, is not even parsed here.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING

from fastapi import HTTPException
from starlette.datastructures import Headers

from app.errors import ErrorReply

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_DEPTH = 64
"""Lists and objects in each other. A tool's schema goes to some ten; OpenAI allows those ten, too."""

SIGNS = (b"\\u0000", b"\\ud", b"\\uD", b"NaN", b"Infinity")
TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
"""A string, whose end may be missing: looked for again from each of its quotes, it would cost the square."""

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonLimits:
    """Reads a body whole, looks at it, and hands it on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "json" not in Headers(scope=scope).get("content-type", "").lower():
            await self.app(scope, receive, send)
            return
        try:
            messages = await _read(receive)
        except HTTPException as exc:  # larger than boundary.py lets through
            await ErrorReply(exc.status_code, str(exc.detail), code="body_too_large").response()(scope, receive, send)
            return
        reply = refusal(b"".join(message.get("body", b"") for message in messages))
        if reply is not None:
            await reply.response()(scope, receive, send)
            return
        unread = iter(messages)

        async def receive_again() -> Message:
            return next(unread, None) or await receive()

        await self.app(scope, receive_again, send)


async def _read(receive: Receive) -> list[Message]:
    """Everything up to the end of the body, or to the client's leaving."""
    messages = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return messages


def refusal(body: bytes) -> ErrorReply | None:
    """What is wrong with a body, if it is one of these things; whether it is JSON at all is not said here."""
    may_be_deep = body.count(b"[") + body.count(b"{") > MAX_DEPTH
    is_suspect = any(sign in body for sign in SIGNS)
    if not (may_be_deep or is_suspect):
        return None
    try:
        parsed = json.loads(body)
    except RecursionError:
        return _deep(_name_of_depth(body))
    except ValueError:
        return None  # routes say that better
    if may_be_deep:
        is_deep, name = _too_deep(parsed)
        if is_deep:
            return _deep(name)
    for path, problem in _problems(parsed, "") if is_suspect else ():
        where = f"'{path}'" if path else "request body"
        return ErrorReply(400, f"Invalid {where}: {problem}.", code="invalid_value", param=path or None)
    return None


def _deep(param: str | None) -> ErrorReply:
    where = f"'{param}'" if param else "request body"
    message = f"Invalid {where}: it is nested deeper than {MAX_DEPTH} lists and objects."
    return ErrorReply(400, message, code="invalid_value", param=param)


def _too_deep(parsed: object) -> tuple[bool, str | None]:
    """Whether it nests too deep, and under which name of the outermost object. A level at a time, on no stack."""
    names: list[str | None] = [name for name, _ in parsed.items()] if isinstance(parsed, dict) else [None]
    for name in names:
        level = [parsed[name] if isinstance(parsed, dict) else parsed]
        for _ in range(MAX_DEPTH - isinstance(parsed, dict)):
            level = [inner for value in level for inner in _inside(value)]
            if not level:
                break
        if any(isinstance(value, list | dict) for value in level):
            return True, name
    return False, None


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _name_of_depth(body: bytes) -> str | None:
    """Under which name of the outermost object a body nests too deep that no parser takes."""
    depth, name = 0, slice(0, 0)
    for match in TOKENS.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                break
        elif first in b"]}":
            depth -= 1
        elif depth == 1:
            name = slice(*match.span())
    return _text(body[name])


def _text(string: bytes) -> str | None:
    try:
        text = json.loads(string)
    except ValueError:
        return None
    return text if isinstance(text, str) and _problem_of(text) is None else None


def _problems(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Where something is wrong and what, in the order of the body; it is not too deep for this to call itself."""
    match value:
        case str():
            if problem := _problem_of(value):
                yield path, problem
        case float() if not math.isfinite(value):
            yield path, "it is not a finite number"
        case dict():
            for name, inner in value.items():
                if problem := _problem_of(name):
                    yield path, f"a name in it is no text: {problem}"
                yield from _problems(inner, f"{path}.{name}" if path else name)
        case list():
            for index, inner in enumerate(value):
                yield from _problems(inner, f"{path}[{index}]")


def _problem_of(text: str) -> str | None:
    if "\0" in text:
        return "the text has a NUL character"
    if LONE_SURROGATE.search(text):
        return "the text has a lone surrogate and is not Unicode"
    return None
