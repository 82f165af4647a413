"""The content of an answer as blocks, and the events in which a stream tells of them: made together, so they agree.

    content_block_start  content_block_delta...  content_block_stop      one block after the other

An answer's text, its thoughts and each call of a tool are blocks of their own.
"""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic_core import from_json

from models.deltas import CallArguments, CallBegins, Content, Delta, Reasoning
from models.json_scan import ValueScanner

Event = dict[str, Any]


class AnswerContent:
    """Takes an answer's deltas; `blocks` are those begun so far, the last of them open until `close`."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._kind: str | None = None
        self._json = CleanJson()

    def add(self, delta: Delta) -> list[Event]:
        """Take what comes next; the events that tell of it."""
        match delta:
            case Content(text):
                events = self._within({"type": "text", "text": ""})
                self.blocks[-1]["text"] += text
                return [*events, self._delta({"type": "text_delta", "text": text})]
            case Reasoning(text):
                events = self._within({"type": "thinking", "thinking": "", "signature": ""})
                self.blocks[-1]["thinking"] += text
                return [*events, self._delta({"type": "thinking_delta", "thinking": text})]
            case CallBegins(_, call_id, name):
                events = self.close()
                self._json = CleanJson()
                return [*events, self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})]
            case CallArguments(_, text):
                assert self._kind == "tool_use", "the arguments of a call follow its beginning"
                return [self._delta({"type": "input_json_delta", "partial_json": self._json.feed(text)})]

    def close(self) -> list[Event]:
        """End the open block, if there is one."""
        if self._kind is None:
            return []
        block, events = self.blocks[-1], []
        if self._kind == "thinking":
            block["signature"] = signature(block["thinking"])
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        elif self._kind == "tool_use":
            block["input"] = tool_input(self._json.text)
        self._kind = None
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _within(self, block: dict[str, Any]) -> list[Event]:
        """Be in a block of this kind."""
        return [] if self._kind == block["type"] else [*self.close(), self._begin(block)]

    def _begin(self, block: dict[str, Any]) -> Event:
        self.blocks.append(block)
        self._kind = block["type"]
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


class CleanJson:
    """A call's arguments as they come, with what models write into strings and JSON forbids there escaped.

    Anthropic's clients parse them, and give up on a plain line break within a string.
    """

    def __init__(self) -> None:
        self.text = ""
        self._scanner = ValueScanner()

    def feed(self, text: str) -> str:
        """Take more; the same, clean."""
        clean = "".join(map(self._character, text))
        self.text += clean
        return clean

    def _character(self, character: str) -> str:
        was_inside = self._scanner.is_inside_string
        self._scanner.take(character)
        return f"\\u{ord(character):04x}" if was_inside and character < " " else character


def tool_input(arguments: str) -> dict[str, Any]:
    """The object that a call's arguments are: as much of it as is there, and nothing where they are no object.

    The same parser in the same mode as in Anthropic's own client, so that a stream comes to the same.
    """
    try:
        value = from_json(arguments, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def signature(thought: str) -> str:
    """What stands by a thought; clients send both back, and here it means nothing."""
    return hashlib.blake2b(thought.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
