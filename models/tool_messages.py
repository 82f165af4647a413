"""Messages with calls and results, as a template that knows tools takes them.

Templates agree that there are `tool_calls`, and not on the rest: whether arguments are an object or its JSON, and
whether a message that only calls has an empty content or none. A rendering of a small conversation at start-up shows
which of these a template can write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import TemplateFailed

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"word_of_probe": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class ToolMessages:
    """How one template wants them. `names_thoughts`: it reads a call's reasoning as `thinking`, as gpt-oss' does."""

    arguments_as_text: bool = False
    empty_content: str | None = None
    names_thoughts: bool = False

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template wants them; tool results learn the name of the tool they are of."""
        names: dict[str, str] = {}
        adapted: list[Message] = []
        for message in messages:
            for call in message.get("tool_calls") or ():
                names[call.get("id") or ""] = call["function"]["name"]
            if message.get("tool_calls"):
                adapted.append(self._with_calls(message))
            elif message.get("role") == "tool" and "name" not in message:
                name = names.get(message.get("tool_call_id") or "")
                adapted.append({**message, "name": name} if name else message)
            else:
                adapted.append(message)
        return adapted

    def _with_calls(self, message: Message) -> Message:
        changed = {**message, "content": message.get("content") or self.empty_content}
        if self.names_thoughts and message.get("reasoning_content"):
            changed["thinking"] = message["reasoning_content"]
        if self.arguments_as_text:
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        return changed


def probe(render: Callable[[Sequence[Message], Sequence[Tool]], str], *, names_thoughts: bool) -> ToolMessages | None:
    """The first way in which a template writes a call whole; None where it writes none, though it knows tools.

    (DeepSeek V3's own wants a content that is none, and transformers leaves out what is none.)
    """
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"word_of_probe": "a"}}}
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "abcdefghi"},
    ]
    for as_text in (False, True):
        for empty in ("", None):
            way = ToolMessages(as_text, empty, names_thoughts)
            try:
                text = render(way.adapted(messages), [_TOOL])
            except TemplateFailed:
                continue
            # The key stands once more where the tool is described, so it is the value with it that tells.
            if '"word_of_probe": "a"' in text or '"word_of_probe":"a"' in text:
                return way
    return None


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
