"""Schemas made at random, answered by the real model over HTTP: what ends by itself is valid, and nearly all does.

Twenty in the suite; 200 with `make schemas`. Seeds are fixed, depth is bounded, and so are strings and arrays.
"""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from models.embedded import NAME
from models.json_schema import ANNOTATIONS, SUPPORTED
from tests.app.live import client
from tests.app.test_answers import URL
from tests.models.schemas import SchemaMaker

if TYPE_CHECKING:
    from tests.app.live import Live

AT_ONCE = 16
MAX_TOKENS = 512
MOST_CUT_SHORT = 0.02
ASK = [{"role": "user", "content": "Fill in the form."}]
TEMPERATURES = (0, 1)

UNLISTED = (
    *("not", "oneOf", "allOf", "if", "then", "else", "patternProperties", "uniqueItems", "contains", "minContains"),
    *("maxContains", "minProperties", "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$anchor", "$vocabulary"),
    *("contentEncoding", "contentMediaType", "contentSchema", "dependencies", "additionalItems", "x-anything"),
)
"""Of JSON Schema 2020-12 and of draft 7 what is neither held to nor an annotation."""


def form(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}}


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.golden, pytest.mark.timeout(0)])])
def test_every_answer_that_ends_by_itself_is_valid_and_few_do_not(fresh: Live, count: int) -> None:
    schemas = [SchemaMaker(seed).make() for seed in range(count)]
    asked = [(schema, temperature) for schema in schemas for temperature in TEMPERATURES]

    with client(fresh) as http, ThreadPoolExecutor(AT_ONCE) as threads:

        def ask(number: int) -> tuple[str, str]:
            schema, temperature = asked[number]
            body = {"model": NAME, "messages": ASK, "response_format": form(schema), "max_tokens": MAX_TOKENS}
            answer = http.post(URL, json={**body, "temperature": temperature, "seed": number}, timeout=None)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            return choice["finish_reason"], choice["message"]["content"]

        answers = list(threads.map(ask, range(len(asked))))
    ends = Counter(reason for reason, _ in answers)
    print(f"{count} schemas, {len(asked)} answers: {dict(ends)}")
    assert ends.keys() <= {"stop", "length"}
    for (schema, _), (reason, text) in zip(asked, answers, strict=True):
        if reason == "stop":
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            validator.validate(json.loads(text))
    cut_short = [(asked[number][0], text) for number, (reason, text) in enumerate(answers) if reason == "length"]
    assert len(cut_short) <= MOST_CUT_SHORT * len(asked), cut_short


@pytest.mark.parametrize("keyword", UNLISTED)
def test_an_unlisted_keyword_is_a_400_that_names_it(fresh: Live, keyword: str) -> None:
    assert keyword not in (*SUPPORTED, *ANNOTATIONS)
    schema = {"type": "object", "properties": {"a": {"type": "string", keyword: {}}}}
    with client(fresh) as http:
        answer = http.post(URL, json={"model": NAME, "messages": ASK, "response_format": form(schema)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert f"'{keyword}'" in error["message"]
