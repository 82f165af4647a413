"""Request bodies of the Anthropic dialect, with Dormouse's extras. What becomes of which field: anthropic_fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from app.anthropic_blocks import CacheControl, Said, SystemBlocks
from app.anthropic_fields import NOT_BUILT
from app.bodies import Body, Priority, SessionIdText, StopString, Text, refusal
from app.extras import SessionExtras
from app.fields import refuse_not_built
from app.tool_bodies import MAX_TOOLS, ToolName

MAX_STOPS = 64
"""Each is looked for in all of the text."""


class Tool(Body):
    """A tool that the client will run; those that Anthropic defines or runs are refused by name."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_the_clients_own(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = f"Tools of type '{kind[:40]}' are not supported: this server knows tools with an 'input_schema'."
            raise refusal(message, "type", "unsupported_value")
        return tool


class ToolChoice(Body):
    """Whether tools may or must be used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise refusal("A 'tool_choice' of type 'tool' must have a 'name'.", "name", "missing_required_parameter")
        return self


class Thinking(Body):
    """Whether the model is to think; how much is up to it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """What the answer's text must look like."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How hard the model is to try, and in which form it answers."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Diagnostics(Body):
    """Asks why the cache was missed, if it was; here the session says, whichever message is named."""

    previous_message_id: Text | None = None


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    model: Text
    messages: Annotated[list[Said], Field(min_length=1)]
    system: SystemBlocks | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_but_not_built(cls, body: Any) -> Any:
        if isinstance(body, dict):
            refuse_not_built(body, NOT_BUILT)
        return body

    @model_validator(mode="after")
    def _consistent(self) -> CountRequest:
        known = {tool.name for tool in self.tools or ()}
        if len(known) < len(self.tools or ()):
            raise refusal("Two of the 'tools' have the same name.", "tools", "invalid_value")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not known:
            raise refusal("'tool_choice' wants a tool used, and there are no 'tools'.", "tool_choice", "invalid_value")
        if choice is not None and choice.type == "tool" and choice.name not in known:
            message = f"'tool_choice' names '{choice.name}', which is none of the 'tools'."
            raise refusal(message, "tool_choice.name", "invalid_value")
        last = self.messages[-1]
        if last.role == "assistant" and any(block.type == "tool_use" for block in last.content):
            message = "The last message uses a tool, and no 'tool_result' follows it."
            raise refusal(message, f"messages[{len(self.messages) - 1}]", "invalid_value")
        return self

    @property
    def keep_seconds(self) -> float | None:
        """The longest that any of its marks asks for."""
        marks = [self.cache_control, *(block.cache_control for block in self.system or ())]
        marks += [tool.cache_control for tool in self.tools or ()]
        marks += [block.cache_control for said in self.messages for block in said.content]
        return max((mark.seconds for mark in marks if mark is not None), default=None)


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    metadata: dict[str, Any] | None = None
    diagnostics: Diagnostics | None = None

    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    session_id: SessionIdText | None = None
    parent_session_id: SessionIdText | None = None
    cache_salt: Annotated[Text, StringConstraints(min_length=1, max_length=1024)] | None = None
    cache_prompt: bool | None = None
    priority: Priority | None = None
    session: SessionExtras | None = None
