"""Blocks that the messages of an Anthropic request consist of, and what may stand beside any of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from app.bodies import Body, Text, refusal
from app.extras import seconds_of
from app.messages import Content

USUAL_TTL = "5m"
"""What a `cache_control` means that says no more."""

_NEEDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""Kinds of blocks that are read; kind -> what it must have."""

_SAID_BY = {"thinking": "assistant", "redacted_thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}

BILLING = "x-anthropic-billing-header:"


class CacheControl(Body):
    """A mark that what stands before it should be kept."""

    type: Literal["ephemeral"]
    ttl: Text | None = None

    @property
    def seconds(self) -> float:
        """How long; a ttl that is not understood says no more than the mark does."""
        return seconds_of(self.ttl) or seconds_of(USUAL_TTL) or 0.0


class Block(Body):
    """One block of any kind; which fields it has, its type says."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: Text | None = None
    thinking: Text | None = None
    id: Annotated[Text, Field(max_length=256)] | None = None
    name: Text | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Text | None = None
    content: Content | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_read(cls, block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _NEEDS:
            message = f"Content blocks of type '{kind[:40]}' are not supported: this server reads text."
            raise refusal(message, "type", "unsupported_content_block")
        return block

    @model_validator(mode="after")
    def _whole(self) -> Block:
        for name in _NEEDS[self.type]:
            if getattr(self, name) is None:
                message = f"A block of type '{self.type}' must have '{name}'."
                raise refusal(message, name, "missing_required_parameter")
        return self


def blocks_of(content: object) -> object:
    """A string stands for one block of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[list[Block], BeforeValidator(blocks_of)]


class Said(Body):
    """What one side said. Clients tell the system's words here, too, where they come late."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _by_whom(self) -> Said:
        for index, block in enumerate(self.content):
            if _SAID_BY.get(block.type, self.role) != self.role:
                message = f"A block of type '{block.type}' belongs to the {_SAID_BY[block.type]}."
                raise refusal(message, f"content[{index}].type", "invalid_value")
        return self


class SystemBlock(Body):
    """One block of the system prompt."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None

    @property
    def for_the_model(self) -> str:
        """Without the line in which Claude Code tells Anthropic whom to bill.

        It has a new checksum in each request, and at the very front of the prompt: nothing behind it would be
        reused (docs/decisions/017).
        """
        if not self.text.startswith(BILLING):
            return self.text
        return self.text.partition("\n")[2]


SystemBlocks = Annotated[list[SystemBlock], BeforeValidator(blocks_of)]
