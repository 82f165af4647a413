"""Fields of a request that say what its answer must look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from app.bodies import Body, Text, refusal
from app.tool_bodies import NamedTool

Pattern = Annotated[Text, StringConstraints(min_length=1, max_length=65_536)]
Choices = Annotated[list[Annotated[Text, StringConstraints(min_length=1)]], Field(min_length=1, max_length=1024)]


def _parsed(value: object) -> object:
    """vLLM takes a schema as JSON, too."""
    import json

    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refusal("A schema that is a text must be JSON.", "", "invalid_value") from error


Schema = Annotated[dict[str, Any], BeforeValidator(_parsed)]


class JsonSchema(Body):
    """OpenAI's; the schema is held to whether it is called strict or not."""

    name: Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's: text, any JSON object, or what a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("A 'json_schema' belongs to type 'json_schema'.", "json_schema", "invalid_value")
        return self


class StructuredOutputs(Body):
    """vLLM's newer form of its guided_ fields."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None


class ToolChoice(Body):
    """Whether tools may or must be called, and which; `names` None: any."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    is_named: bool = False


def choice_of(value: object) -> object:
    """OpenAI's `tool_choice`, a word or an object, as a ToolChoice."""
    if value is None or isinstance(value, ToolChoice):
        return value
    if value in ("none", "auto", "required"):
        return ToolChoice(mode=value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        try:
            named = NamedTool.model_validate(value)
        except ValueError as error:
            raise refusal("A named tool is {type, function: {name}}.", "function.name", "invalid_value") from error
        return ToolChoice(mode="required", names=frozenset({named.function.name}), is_named=True)
    if kind == "allowed_tools":
        return _allowed(value)
    raise refusal("'tool_choice' must be none, auto, required, or an object that names tools.", "", "invalid_value")


def _allowed(value: Any) -> ToolChoice:
    allowed = value.get("allowed_tools")
    try:
        names = frozenset(NamedTool.model_validate(tool).function.name for tool in allowed["tools"])
        mode = allowed["mode"]
    except (ValueError, TypeError, KeyError) as error:
        raise refusal("'allowed_tools' is {mode, tools: [...]}.", "allowed_tools", "invalid_value") from error
    if mode != "required":
        message = "'allowed_tools' is supported with mode 'required' only: a free answer cannot be kept from a tool."
        raise refusal(message, "allowed_tools.mode", "unsupported_value")
    return ToolChoice(mode="required", names=names)
