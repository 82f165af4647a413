"""An Anthropic request -> the chat request that means the same.

    system                      a system message
    text                        content; a user's blocks on lines of their own, an assistant's end to end
    thinking                    the assistant's reasoning; signatures are not looked at
    tool_use, tool_result       a call, and a tool's message
    a last assistant's message  is continued
    cache_control               how long the session is worth keeping

Neighbouring messages of one side are one, as at Anthropic: many templates want the sides to alternate.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from app.anthropic_request import MAX_STOPS, MessagesRequest
from app.bodies import StopString
from app.extras import PromptCacheOptions
from app.messages import Message
from app.schema import ChatRequest, Effort
from app.structure_bodies import JsonSchema, ResponseFormat, ToolChoice
from app.tool_bodies import CalledFunction, Function, Tool, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.anthropic_blocks import Block
    from app.anthropic_request import CountRequest, OutputFormat
    from app.anthropic_request import ToolChoice as AnthropicChoice

_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class AnthropicChat(ChatRequest):
    """A chat request that came in Anthropic's words."""

    schema_field: ClassVar[str] = "output_config.format.schema"

    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None


def chat_request(body: CountRequest, has_switch: bool) -> AnthropicChat:
    """The request that our turns are made of; `has_switch`: the model's template can be told whether to think."""
    messages = list(_messages(body))
    continues = messages[-1].role == "assistant"
    if continues and not messages[-1].content and not messages[-1].reasoning_content and len(messages) > 1:
        messages.pop()  # an answer that is to go on from nothing
        continues = False
    choice, keep_seconds = body.tool_choice, body.keep_seconds
    return AnthropicChat(
        model=body.model,
        messages=messages,
        continue_final_message=continues,
        tools=[_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()] or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort=_effort(body) if has_switch else None,
        response_format=_format(body.output_config.format if body.output_config is not None else None),
        prompt_cache_options=None if keep_seconds is None else PromptCacheOptions(ttl=f"{keep_seconds:.0f}s"),
        **(_sampling(body) if isinstance(body, MessagesRequest) else {}),
    )


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    """Fields that both dialects have, but for one, under the same names."""
    same = (
        "max_tokens", "temperature", "top_p", "top_k", "metadata", "seed", "stream",
        "session_id", "parent_session_id", "cache_salt", "cache_prompt", "priority", "session",
    )  # fmt: skip
    return {**{name: getattr(body, name) for name in same}, "stop": body.stop_sequences}


def _messages(body: CountRequest) -> Iterator[Message]:
    system = "\n".join(text for block in body.system or () if (text := block.for_the_model))
    if system:
        yield Message(role="system", content=system)
    for role, group in groupby(body.messages, key=lambda said: said.role):
        blocks = [block for said in group for block in said.content]
        if role == "assistant":
            yield _answer(blocks)
        elif role == "user":
            yield from _asked(blocks)
        else:
            yield Message(role="system", content=_joined(blocks))


def _answer(blocks: Sequence[Block]) -> Message:
    thoughts = "".join(block.thinking or "" for block in blocks)
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    return Message(
        role="assistant",
        content="".join(block.text or "" for block in blocks if block.type == "text"),
        reasoning_content=thoughts or None,
        tool_calls=calls or None,
    )


def _call(block: Block) -> ToolCall:
    assert block.name is not None
    arguments = json.dumps(block.input, ensure_ascii=False)
    return ToolCall(id=block.id or "", function=CalledFunction(name=block.name, arguments=arguments))


def _asked(blocks: Sequence[Block]) -> Iterator[Message]:
    """Results and texts in their order."""
    for is_result, group in groupby(blocks, key=lambda block: block.type == "tool_result"):
        if not is_result:
            yield Message(role="user", content=_joined(list(group)))
            continue
        for block in group:
            told = ("Error: " if block.is_error else "") + (block.content or "")
            yield Message(role="tool", content=told, tool_call_id=block.tool_use_id)
    if not blocks:
        yield Message(role="user", content="")


def _joined(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text or "" for block in blocks)


def _tool(name: str, description: str | None, schema: dict[str, object]) -> Tool:
    return Tool(type="function", function=Function(name=name, description=description, parameters=schema))


def _choice(choice: AnthropicChoice) -> ToolChoice:
    names = frozenset({choice.name}) if choice.type == "tool" and choice.name is not None else None
    return ToolChoice.model_validate({"mode": _MODES[choice.type], "names": names, "is_named": names is not None})


def _effort(body: CountRequest) -> Effort | None:
    """Without a word about thinking there is none, as with most of Anthropic's models. None: as the model likes."""
    kind = "disabled" if body.thinking is None else body.thinking.type
    effort = None if body.output_config is None else body.output_config.effort
    if kind == "disabled":
        return "none"
    return effort or ("medium" if kind == "enabled" else None)


def _format(wanted: OutputFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    schema = JsonSchema.model_validate({"name": "answer", "schema": wanted.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)
