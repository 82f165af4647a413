"""Tools as a chat request describes and chooses them, and as its messages tell of their calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from app.bodies import Body, Text, refusal
from models.meaning import loaded

MAX_TOOLS = 256

ToolName = Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class Function(Body):
    """What a tool is called, what it is for, and the JSON schema of its arguments."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the client will run; tools that a server would run are refused by name."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            message = f"Tools of type '{str(tool['type'])[:40]}' are not supported: this server knows functions only."
            raise refusal(message, "type", "unsupported_value")
        return tool

    def as_template(self) -> dict[str, Any]:
        """As OpenAI spells it, without what was left out: templates print what they are given."""
        return self.model_dump(exclude_none=True)


class NamedFunction(Body):
    """Which function."""

    name: ToolName


class NamedTool(Body):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """The tool a message called; `arguments` is the JSON that it called it with."""

    name: Text
    arguments: Text


class ToolCall(Body):
    """One call in an assistant's message."""

    id: Text = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template(self) -> dict[str, Any]:
        """The arguments as an object where they are one, as templates expect."""
        arguments = loaded(self.function.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}
