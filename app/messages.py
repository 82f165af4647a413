"""The messages of a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from app.bodies import Body, Text, refusal


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
    """One message of text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None

    def as_template(self) -> dict[str, str]:
        """As chat templates know it; few have heard of developers, who took the place of the system."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content, **named}

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") in {"tool", "function"}:
            raise refusal("Tool messages are not supported by this server yet.", "role", "unsupported_value")
        for name in ("tool_calls", "function_call", "audio"):
            if message.get(name):
                raise refusal(f"'{name}' is not supported by this server yet.", name, "unsupported_parameter")
        if message.get("role") == "assistant" and message.get("content", "") is None:
            # What SDKs send back for an answer without text.
            return {**message, "content": message.get("refusal") or ""}
        return message
