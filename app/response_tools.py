"""Tools in a Responses request: flat, and in company of tools that only OpenAI or one agent knows.

Agents send their own kinds along whatever server they speak to (Codex: web search, a shell, a patch as free text).
What is no function is not described to the model, so it is never called; the answer's `tools` are those that were.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from app.bodies import Body, Text, refusal
from app.structure_bodies import ToolChoice
from app.tool_bodies import Function, Tool, ToolName


class ResponseTool(Body):
    """A function that the client will run."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        """As a chat request has it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(type="function", function=function)

    def as_object(self) -> dict[str, object]:
        """As the answer repeats it."""
        return self.model_dump()


def only_functions(value: object) -> object:
    """The tools that can be described; an object without a type is left for pydantic to refuse."""
    if not isinstance(value, list):
        return value
    return [tool for tool in value if not _is_foreign(tool)]


def _is_foreign(tool: object) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind != "function"


class NamedFunction(Body):
    """Which function."""

    type: Literal["function"]
    name: ToolName


class ChosenTool(Body):
    """Whether tools may or must be called, and which."""

    mode: Literal["none", "auto", "required"]
    names: list[ToolName] | None = Field(default=None, max_length=256)
    is_named: bool = False

    def as_chat(self) -> ToolChoice:
        """As a chat request has it."""
        names = None if self.names is None else frozenset(self.names)
        return ToolChoice(mode=self.mode, names=names, is_named=self.is_named)

    def as_object(self) -> object:
        """As the answer repeats it."""
        if self.names is None:
            return self.mode
        tools = [{"type": "function", "name": name} for name in self.names]
        return tools[0] if self.is_named else {"type": "allowed_tools", "mode": self.mode, "tools": tools}


def choice_of(value: object) -> object:
    """OpenAI's `tool_choice`, a word or an object."""
    if value is None or isinstance(value, ChosenTool):
        return value
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ChosenTool.model_validate({"mode": value})
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return ChosenTool(mode="required", names=[_named(value, "name")], is_named=True)
    if kind == "allowed_tools":
        return _allowed(value)
    if isinstance(kind, str):
        message = f"'tool_choice' of type '{kind[:40]}' is not supported: this server knows functions only."
        raise refusal(message, "type", "unsupported_value")
    raise refusal("'tool_choice' must be none, auto, required, or an object that names tools.", "", "invalid_value")


def _named(value: object, param: str) -> str:
    try:
        return NamedFunction.model_validate(value).name
    except ValidationError as error:
        raise refusal("A named tool is {type: function, name}.", param, "invalid_value") from error


def _allowed(value: Any) -> ChosenTool:
    tools, mode = value.get("tools"), value.get("mode")
    if not isinstance(tools, list) or not tools:
        raise refusal("'allowed_tools' is {type, mode, tools: [...]}.", "tools", "invalid_value")
    if mode != "required":
        message = "'allowed_tools' is supported with mode 'required' only: a free answer cannot be kept from a tool."
        raise refusal(message, "mode", "unsupported_value")
    names = [_named(tool, f"tools[{index}]") for index, tool in enumerate(tools[:256])]
    return ChosenTool(mode="required", names=names)
