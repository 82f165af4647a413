"""Tools for models whose chat template knows none: described in a system message, called as Hermes calls them.

assistant   its calls are written into its content, as Hermes writes them
tool        results become user messages, those that follow each other one
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

PROMPT = """You can call functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
To call one, answer with a JSON object that has its name and arguments, within <tool_call></tool_call>. To call \
several, answer with several of these:
<tool_call>
{{"name": <name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Written:
    """Messages for a template without tools, and of how many messages each was made."""

    messages: list[Message]
    origins: list[int]

    def ends(self, message_ends: Sequence[int]) -> tuple[int, ...]:
        """Ends of these messages' contents -> ends of those they were made of."""
        if len(message_ends) != len(self.messages):
            return ()
        return tuple(end for end, count in zip(message_ends, self.origins, strict=True) for _ in range(count))


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Written:
    """The messages as a template without tools can write them."""
    written = Written([], [])
    is_result = False
    for message in messages:
        role = message.get("role")
        if role == "tool":
            _add_result(written, str(message.get("content")), joins=is_result)
        else:
            written.messages.append(_with_calls(message) if message.get("tool_calls") else message)
            written.origins.append(1)
        is_result = role == "tool"
    if tools:
        _describe(written, "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return written


def _describe(written: Written, tools: str) -> None:
    described = PROMPT.format(tools=tools)
    first = written.messages[0] if written.messages else {}
    if first.get("role") == "system":
        written.messages[0] = {**first, "content": f"{first.get('content')}\n\n{described}"}
    else:
        written.messages.insert(0, {"role": "system", "content": described})
        written.origins.insert(0, 0)


def _with_calls(message: Message) -> Message:
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    content = [message["content"]] if message.get("content") else []
    text = "\n".join([*content, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])
    return {"role": "assistant", "content": text}


def _add_result(written: Written, content: str, *, joins: bool) -> None:
    result = f"<tool_response>\n{content}\n</tool_response>"
    if joins:
        before = written.messages[-1]["content"]
        written.messages[-1] = {"role": "user", "content": f"{before}\n{result}"}
        written.origins[-1] += 1
    else:
        written.messages.append({"role": "user", "content": result})
        written.origins.append(1)
