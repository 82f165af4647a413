"""The items of a Responses request <-> the messages of a chat.

What one answer consisted of comes back as several items, one for its thought, its text and each of its calls:

    reasoning, message (assistant), function_call, function_call      one assistant's message
    function_call_output                                              a tool's message
    message (system, developer, user)                                 a message

An assistant's message ends where an item of somebody else follows, where another thought begins, and between two
texts without a call among them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from app.bodies import refusal
from app.messages import Message

SEALED = "dormouse:"
"""Begins our own `encrypted_content`. It is no secret: the thought stands beside it in the clear."""

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def sealed(thought: str) -> str:
    """A thought as an `encrypted_content`, for clients that send nothing else of it back."""
    return SEALED + base64.urlsafe_b64encode(thought.encode("utf-8", "replace")).decode()


def _unsealed(content: object) -> str:
    """The thought; of what others have sealed nothing can be read."""
    if not isinstance(content, str) or not content.startswith(SEALED):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(SEALED)).decode()
    except (binascii.Error, ValueError):
        return ""


def messages_of(value: object) -> object:
    """`input`, a text or a list of items, as messages."""
    if isinstance(value, str):
        return [Message(role="user", content=value)]
    if not isinstance(value, list):
        raise refusal("'input' must be a text or a list of items.", "", "invalid_type")
    reader = _Reader()
    for index, item in enumerate(value):
        reader.take(index, item)
    return reader.finish()


class _Reader:
    """Gathers what the items of one answer say; whatever else comes, comes after it."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._thought = ""
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._last = 0

    def finish(self) -> list[Message]:
        self._close()
        return self._messages

    def take(self, index: int, item: object) -> None:
        if not isinstance(item, dict):
            raise refusal("An item of 'input' must be an object.", f"[{index}]", "invalid_type")
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message" if item.get("role") == "assistant":
                if self._texts and not self._calls:
                    self._close()
                self._texts.append(_text(item.get("content"), f"[{index}].content"))
            case "message":
                self._other(index, role=_role(index, item), content=_text(item.get("content"), f"[{index}].content"))
            case "reasoning":
                self._close()
                self._thought = _thought_of(index, item)
            case "function_call" | "custom_tool_call":
                self._calls.append(_call(index, item, kind))
            case "function_call_output" | "custom_tool_call_output":
                call_id = _string(index, item, "call_id")
                self._other(
                    index, role="tool", tool_call_id=call_id, content=_text(item.get("output"), f"[{index}].output")
                )
            case _:
                message = f"Items of type '{str(kind)[:40]}' are not supported by this server."
                raise refusal(message, f"[{index}].type", "unsupported_value")
        self._last = index

    def _other(self, index: int, **fields: Any) -> None:
        self._close()
        self._add(index, fields)

    def _close(self) -> None:
        """The assistant has said what it had to say."""
        if self._texts or self._calls:
            fields: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
            if self._thought:
                fields["reasoning_content"] = self._thought
            if self._calls:
                fields["tool_calls"] = self._calls
            self._add(self._last, fields)
        self._thought, self._texts, self._calls = "", [], []

    def _add(self, index: int, fields: Mapping[str, Any]) -> None:
        try:
            self._messages.append(Message.model_validate(fields))
        except ValidationError as error:
            raise refusal(f"Invalid item: {error.errors()[0]['msg']}.", f"[{index}]", "invalid_value") from error


def _role(index: int, item: Mapping[str, Any]) -> str:
    role = item.get("role")
    if role not in ("system", "developer", "user"):
        message = "The 'role' of a message must be system, developer, user or assistant."
        raise refusal(message, f"[{index}].role", "invalid_value")
    return str(role)


def _call(index: int, item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A call as a chat's message has it; the free text of a custom tool stands as its one argument."""
    arguments = _string(index, item, "arguments" if kind == "function_call" else "input")
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": arguments}, ensure_ascii=False)
    function = {"name": _string(index, item, "name"), "arguments": arguments}
    return {"id": _string(index, item, "call_id"), "type": "function", "function": function}


def _thought_of(index: int, item: Mapping[str, Any]) -> str:
    """What was thought, where it is told; a summary is no thought."""
    parts = item.get("content")
    if parts is None or parts == []:
        return _unsealed(item.get("encrypted_content"))
    if not isinstance(parts, list):
        raise refusal("The 'content' of a reasoning item is a list.", f"[{index}].content", "invalid_type")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        message = "A part of a reasoning item's 'content' must carry a string 'text'."
        raise refusal(message, f"[{index}].content", "invalid_type")
    return "".join(str(text) for text in texts)


def _string(index: int, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        message = f"An item of type '{item.get('type')}' must carry a string '{name}'."
        raise refusal(message, f"[{index}].{name}", "missing_required_parameter" if value is None else "invalid_type")
    return value


def _text(content: object, place: str) -> str:
    """A string, or text parts joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refusal(f"'input{place}' must be a text or a list of parts.", place, "invalid_type")
    return "\n".join(_text_of_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise refusal("A content part must be an object with a 'type'.", place, "invalid_type")
    if kind not in TEXT_PARTS:
        message = f"Content parts of type '{kind[:40]}' are not supported: this server reads text parts only."
        raise refusal(message, f"{place}.type", "unsupported_content_part")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise refusal(f"A part of type {kind} must carry a string.", f"{place}.{TEXT_PARTS[kind]}", "invalid_type")
    return text
