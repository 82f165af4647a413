"""What messages mean, however a client spells them: by this a conversation is known again.

White space round a content, the spelling of a call's JSON, ids of calls and thoughts do not count. Who said what,
which tools were called with which arguments, and in which order, does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.deltas import Said

Message = Mapping[str, Any]
DIGEST_BYTES = 16


class Meanings:
    """A running digest over messages."""

    def __init__(self) -> None:
        self._running = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"dormouse-said")

    def add(self, message: Message) -> bytes:
        """The digest up to and including `message`."""
        spelled = json.dumps(_meaning(message), ensure_ascii=False, separators=(",", ":"))
        self._running.update(spelled.encode("utf-8", "surrogatepass") + b"\n")
        return self._running.digest()


def answer_digests(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Digests up to the end of each assistant message, ascending."""
    meanings = Meanings()
    digests = [(message.get("role"), meanings.add(message)) for message in messages]
    return tuple(digest for role, digest in digests if role == "assistant")


def digest_of(messages: Sequence[Message]) -> bytes:
    """The digest of them all."""
    meanings, digest = Meanings(), b""
    for message in messages:
        digest = meanings.add(message)
    return digest


def message_of(said: Said, before: str = "") -> dict[str, Any]:
    """An answer as the assistant's message that a client will send back; `before` is what it continued."""
    message: dict[str, Any] = {"role": "assistant", "content": before + said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": loaded(call.arguments)}}
            for call in said.calls
        ]
    return message


def loaded(arguments: str) -> Any:
    """A call's arguments as an object; a text that is no JSON object stays the text it is."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def means_the_same(left: Said, right: Said) -> bool:
    """They differ in spelling only; thoughts count here, since they are part of the text."""
    if left.reasoning.strip() != right.reasoning.strip():
        return False
    return _meaning(message_of(left)) == _meaning(message_of(right))


def _meaning(message: Message) -> list[object]:
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    return [
        message.get("role"),
        content.strip() if isinstance(content, str) else "",
        [[call["function"]["name"], _canonical(call["function"]["arguments"])] for call in calls],
    ]


def _canonical(arguments: object) -> str:
    value = loaded(arguments) if isinstance(arguments, str) else arguments
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
