"""What a request wants an answer to look like -> the grammar that its tokens are held to.

response_format                     OpenAI
tool_choice                         required, or one tool by name
guided_*, structured_outputs        vLLM
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.errors import InvalidRequest
from models import constraint
from models.errors import GrammarRefused

if TYPE_CHECKING:
    from app.gateway import Gateway
    from app.schema import ChatRequest
    from models.constraint import Constraint
    from models.grammar import Grammar
    from models.rendering import Rendered

Constrain = Callable[["Rendered"], "Grammar"]
"""The grammar for the answer to a prompt; slow, and called off the event loop."""

CODE = "unsupported_schema"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A constraint, and the field that asks for it."""

    param: str
    make: Callable[[], Constraint]


def constrain(gateway: Gateway, request: ChatRequest) -> Constrain | None:
    """How to hold the answer to what the request asks; None where it may say anything.

    Raises:
        InvalidRequest: several fields ask for different things.
    """
    wanted = [*_formats(request), *_guided(request)]
    if len(wanted) > 1:
        raise InvalidRequest(f"'{wanted[0].param}' and '{wanted[1].param}' cannot both be asked for.", wanted[1].param)
    calls = _calls(gateway, request)
    if not wanted and (calls is None or not request.must_call):
        return None

    def compiled(rendered: Rendered) -> Grammar:
        named = calls if calls is not None and request.must_call else wanted[0]
        try:
            found = named.make()
            if calls is not None and not request.must_call and not found.whole:
                found = constraint.either(found, calls.make())
            return gateway.grammars.compile(
                constraint.framed(found, gateway.chat.format, rendered.text, gateway.chat.grammar_marker)
            )
        except GrammarRefused as refused:
            message = f"'{named.param}' cannot be honoured: {refused}."
            raise InvalidRequest(message, named.param, CODE) from refused

    return compiled


def _formats(request: ChatRequest) -> list[Wanted]:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.json_schema is None:
        return [Wanted("response_format", lambda: constraint.json_value({"type": "object"}))]
    schema = asked.json_schema.schema_
    described = {"type": "object"} if schema is None else schema
    return [Wanted(request.schema_field, lambda: constraint.json_value(described))]


def _guided(request: ChatRequest) -> list[Wanted]:
    found = _of("guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    outputs = request.structured_outputs
    if outputs is not None:
        found += _of("structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
        if outputs.json_object:
            found.append(Wanted("structured_outputs.json_object", lambda: constraint.json_value({"type": "object"})))
    return found


def _of(
    prefix: str, schema: Any, pattern: str | None, choice: Sequence[str] | None, grammar: str | None
) -> list[Wanted]:
    found = []
    if schema is not None:
        found.append(Wanted(f"{prefix}json", lambda: constraint.json_value(schema)))
    if pattern is not None:
        found.append(Wanted(f"{prefix}regex", lambda: constraint.regex(pattern)))
    if choice is not None:
        found.append(Wanted(f"{prefix}choice", lambda: constraint.choice(choice)))
    if grammar is not None:
        found.append(Wanted(f"{prefix}grammar", lambda: constraint.grammar(grammar)))
    return found


def _calls(gateway: Gateway, request: ChatRequest) -> Wanted | None:
    """Calls of the tools that may be called."""
    chosen = request.tool_choice
    if not request.tools or (chosen is not None and chosen.mode == "none"):
        return None
    names = None if chosen is None else chosen.names
    tools: list[Mapping[str, Any]] = [
        tool.as_template() for tool in request.tools if names is None or tool.function.name in names
    ]
    several = request.parallel_tool_calls is not False and not (chosen is not None and chosen.is_named)
    chat = gateway.chat
    return Wanted(
        "tools",
        lambda: constraint.calls(chat.format, chat.template_source, tools, chat.grammar_marker, several=several),
    )
