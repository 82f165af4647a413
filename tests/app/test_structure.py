"""Structured answers of the real model over HTTP, and what is refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel

from models.embedded import NAME
from tests.app.live import client
from tests.app.test_answers import URL, events
from tests.app.test_openai_client import strict, sync_client
from tests.models.test_tool_templates import TOOLS

if TYPE_CHECKING:
    from tests.app.live import Live

ASK: Any = [{"role": "user", "content": "Describe Paris."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 99_000_000},
        "kind": {"enum": ["town", "capital"]},
    },
    "required": ["city", "people", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}


def post(server: Live, **fields: Any) -> Any:
    with client(server) as http:
        asked = {"model": NAME, "messages": ASK, "max_tokens": 64, "temperature": 0, **fields}
        return http.post(URL, json=asked, timeout=280)


def said(server: Live, **fields: Any) -> str:
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_keeps_to_its_schema_whole_and_streamed(fresh: Live, temperature: float) -> None:
    text = said(fresh, response_format=FORMAT, temperature=temperature, seed=3)
    value = json.loads(text)
    assert set(value) == {"city", "people", "kind"}
    assert value["kind"] in ("town", "capital")
    stream = events(post(fresh, response_format=FORMAT, temperature=temperature, seed=3, stream=True).text)[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in stream) == text


def test_vllms_names_are_kept_to(fresh: Live) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-c]", said(fresh, guided_regex=r"[0-9]{3}-[a-c]"))
    assert said(fresh, guided_choice=["rain", "sun"]) in ("rain", "sun")
    assert said(fresh, guided_grammar='root ::= "a" ("b" | "c")') in ("ab", "ac")
    assert set(json.loads(said(fresh, guided_json=json.dumps(SCHEMA)))) == {"city", "people", "kind"}
    assert said(fresh, structured_outputs={"choice": ["yes"]}) == "yes"
    assert said(fresh, guided_choice=["yes"], ignore_eos=True) == "yes"


def test_a_tool_that_is_wanted_is_called(fresh: Live) -> None:
    with sync_client(fresh) as openai:
        for choice, reason in (
            ("required", "tool_calls"),
            ({"type": "function", "function": {"name": "get_time"}}, "stop"),
        ):
            wanted: Any = choice
            answer = openai.chat.completions.create(
                model=NAME,
                messages=ASK,
                tools=[_bounded(tool) for tool in TOOLS[1:]],
                tool_choice=wanted,
                parallel_tool_calls=False,
                temperature=0,
                max_tokens=80,
            )
            strict(answer)
            assert answer.choices[0].finish_reason == reason
            assert answer.choices[0].message.tool_calls is not None
            (call,) = answer.choices[0].message.tool_calls
            assert call.type == "function"
            assert call.function.name == "get_time"
            assert set(json.loads(call.function.arguments)) <= {"city", "days"}


def _bounded(tool: Any) -> Any:
    properties = {"city": {"enum": ["Paris", "Rome"]}}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**tool, "function": {**tool["function"], "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml|json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "'not'",
        ),
        ({"guided_json": {"oneOf": []}}, "guided_json", "'oneOf'"),
        ({"guided_json": "{no json"}, "guided_json", "JSON"),
        ({"guided_regex": "(open"}, "guided_regex", "cannot be honoured"),
        ({"guided_grammar": "no grammar"}, "guided_grammar", "cannot be honoured"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"tool_choice": "sometimes"}, "tool_choice", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "tool_choice"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(fresh: Live, fields: Any, param: str, word: str) -> None:
    response = post(fresh, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert re.search(word, error["message"])


class City(BaseModel):
    """What the SDK makes a strict schema of."""

    name: Literal["Paris", "Rome"]
    districts: list[Literal[1, 2]]
    mayor: Mayor | None


class Mayor(BaseModel):
    """A nested object, which the SDK refers to."""

    is_elected: bool


def test_the_sdks_own_parse_gets_its_model(fresh: Live) -> None:
    with sync_client(fresh) as openai:
        answer = openai.chat.completions.parse(
            model=NAME, messages=ASK, response_format=City, temperature=1, seed=2, max_tokens=96, stop=None
        )
    city = answer.choices[0].message.parsed
    assert city is not None
    assert city.name in ("Paris", "Rome")
