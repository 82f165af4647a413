"""The messages of a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from app.bodies import Body, Text, refusal
from app.tool_bodies import ToolCall


def _text_of(content: object) -> object:
    """A string, or text parts joined by line breaks; whatever else pydantic then refuses as no string."""
    if not isinstance(content, list):
        return content
    return "\n".join(_text_of_part(index, part) for index, part in enumerate(content))


def _text_of_part(index: int, part: object) -> str:
    if not isinstance(part, dict):
        raise refusal("A content part must be an object with a 'type'.", f"[{index}]", "invalid_type")
    kind = part.get("type")
    if kind not in {"text", "refusal"}:
        message = f"Content parts of type '{str(kind)[:40]}' are not supported: this server reads text parts only."
        raise refusal(message, f"[{index}].type", "unsupported_content_part")
    text = part.get(kind)
    if not isinstance(text, str):
        raise refusal(f"A {kind} part must carry a string '{kind}'.", f"[{index}].{kind}", "invalid_type")
    return text


Content = Annotated[Text, BeforeValidator(_text_of)]


class Message(Body):
    """One message of text; an assistant's may call tools, a tool's has the result of one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | None = None
    tool_call_id: Text | None = None

    def as_template(self) -> dict[str, Any]:
        """As chat templates know it; few have heard of developers, who took the place of the system."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.role == "assistant" and self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [call.as_template() for call in self.tool_calls]
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @model_validator(mode="before")
    @classmethod
    def _as_clients_send_it(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") == "function":
            raise refusal("Messages of role 'function' were replaced by 'tool'.", "role", "unsupported_value")
        for name in ("function_call", "audio"):
            if message.get(name):
                raise refusal(f"'{name}' is not supported by this server.", name, "unsupported_parameter")
        if message.get("role") != "assistant":
            return message
        changed = dict(message)
        if message.get("content") is None:
            # What SDKs send back for an answer without text.
            changed["content"] = message.get("refusal") or ""
        if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
            changed["reasoning_content"] = message["reasoning"]  # vLLM's newer name
        return changed
