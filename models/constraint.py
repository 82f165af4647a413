"""What an answer must look like, as grammars in llguidance's dialect of Lark.

A constraint has rules that define `body`; `framed` puts before it what may come first: a thought that the prompt has
opened, or gpt-oss' channels. Markers that are special tokens are named by their ids, since no text makes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.call_syntax import DEEPSEEK, LLAMA, MISTRAL
from models.call_syntax import DEEPSEEK_CALLS as BEGINS
from models.harmony import CHANNEL, CONSTRAIN, MESSAGE, START
from models.json_schema import check_schema, with_few_decimals

if TYPE_CHECKING:
    from models.tools import OutputFormat

Marker = Callable[[str], str]
"""A marker's text -> how the grammar names it."""

Tool = Mapping[str, Any]

SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One spelling, json.dumps' own: where white space is free, small models lose themselves in it."""

_TEXT = "TEXT: /(.|\\n)*/\n"


@dataclass(frozen=True, slots=True)
class Constraint:
    """`rules` define `body`; one that is `whole` is a grammar from its `start` on, and stands alone.

    `calls` says that the answer is a call of tools (or may be) and not the content alone.
    """

    rules: str
    whole: bool = False
    calls: bool = False


def json_value(schema: object, name: str = "body") -> Constraint:
    """A value that the schema describes.

    Raises:
        GrammarRefused: the schema has something that cannot be held to.
    """
    check_schema(schema)
    return Constraint(f"{name}: {_json(schema)}\n")


def regex(pattern: str) -> Constraint:
    """A text that the pattern matches whole."""
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
    return Constraint(f"body: /{escaped}/\n")


def choice(texts: Sequence[str]) -> Constraint:
    """One of the texts."""
    return Constraint("body: " + " | ".join(map(_literal, texts)) + "\n")


def grammar(text: str) -> Constraint:
    """A grammar in Lark, or in the EBNF of llama.cpp."""
    from llguidance.gbnf_to_lark import any_to_lark

    from models.errors import GrammarRefused

    try:
        return Constraint(any_to_lark(text), whole=True)
    except Exception as error:  # its converter raises whatever it stumbles over
        raise GrammarRefused(f"the grammar cannot be read: {error}") from error


def calls(form: OutputFormat, template: str, tools: Sequence[Tool], marker: Marker, *, several: bool) -> Constraint:
    """A call of one of `tools`, or `several`, as the family writes them.

    Raises:
        GrammarRefused: a tool's parameters have something that cannot be held to.
    """
    rules = ""
    for index, tool in enumerate(tools):
        parameters = tool["function"].get("parameters") or {"type": "object", "properties": {}}
        check_schema(parameters)
        rules += f"arguments_{index}: {_json(parameters)}\n"
    names = [str(tool["function"]["name"]) for tool in tools]
    one = [_call(form, template, name, f"arguments_{index}", marker) for index, name in enumerate(names)]
    rules += "call: " + " | ".join(one) + "\n"
    return Constraint(rules + _all_calls(form, marker, several), calls=True)


def _call(form: OutputFormat, template: str, name: str, arguments: str, marker: Marker) -> str:
    key = "parameters" if form.syntax is LLAMA and not form.is_harmony else "arguments"
    opening = f'{{"name": {json.dumps(name)}, "{key}": '
    if form.is_harmony:
        return (
            f"{marker(CHANNEL)} {_literal(f'commentary to=functions.{name} ')} {marker(CONSTRAIN)} "
            f'"json" {marker(MESSAGE)} {arguments}'
        )
    if form.syntax is DEEPSEEK:
        _, begin, sep, end, _ = DEEPSEEK.specials
        if "```json" in template:
            named = f'"function" {marker(sep)} {_literal(f"{name}{chr(10)}```json{chr(10)}")} {arguments} "\\n```"'
        else:
            named = f"{_literal(name)} {marker(sep)} {arguments}"
        return f"{marker(begin)} {named} {marker(end)}"
    if form.syntax in (LLAMA, MISTRAL):
        return f'{_literal(opening)} {arguments} "}}"'
    return f'{marker("<tool_call>")} {_literal(chr(10) + opening)} {arguments} "}}\\n" {marker("</tool_call>")}'


def _all_calls(form: OutputFormat, marker: Marker, several: bool) -> str:
    if form.is_harmony or form.syntax is LLAMA:
        return "body: call\n"  # one a message
    if form.syntax is DEEPSEEK:
        more = ' ("\\n" call)*' if several else ""
        return f"body: {marker(BEGINS)} call{more} {marker(DEEPSEEK.specials[-1])}\n"
    if form.syntax is MISTRAL:
        more = ' (", " call)*' if several else ""
        return f'body: {marker(MISTRAL.openings[0])} "[" call{more} "]"\n'
    more = ' ("\\n" call)*' if several else ""
    return f"body: call{more}\n"


def either(answer: Constraint, called: Constraint) -> Constraint:
    """The answer's body, or calls."""
    first = re.sub(r"^body:", "answer:", answer.rules, flags=re.MULTILINE)
    second = re.sub(r"^body:", "called:", called.rules, flags=re.MULTILINE)
    return Constraint(f"{first}{second}body: answer | called\n", calls=True)


def framed(constraint: Constraint, form: OutputFormat, prompt: str, marker: Marker) -> str:
    """The whole grammar of an answer to `prompt`."""
    if constraint.whole:
        return constraint.rules
    if form.is_harmony:
        end, assistant = marker("<|end|>"), f'{marker(START)} "assistant"'
        final = "" if constraint.calls else f'{marker(CHANNEL)} "final" {marker(MESSAGE)} '
        thought = f'analysis: {marker(CHANNEL)} "analysis" {marker(MESSAGE)} TEXT {end} {assistant}\n'
        return f"start: analysis? {final}body\n{thought}{_TEXT}{constraint.rules}"
    thoughts = form.thoughts
    if thoughts is None or not prompt.rstrip().endswith(thoughts.opening):
        return f"start: body\n{constraint.rules}"
    closing = marker(thoughts.closing)
    thought = (
        f"thought: TEXT {closing}\n{_TEXT}" if closing.startswith("<[") else f"thought[suffix={closing}]: /(.|\\n)*/\n"
    )
    return f"start: thought BREAKS body\nBREAKS: /\\n{{0,2}}/\n{thought}{constraint.rules}"


def _json(schema: object) -> str:
    described = schema if isinstance(schema, Mapping) else {} if schema is True else {"enum": []}
    return "%json " + json.dumps({**with_few_decimals(described), "x-guidance": SPELLING})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
