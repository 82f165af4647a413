"""Our own OpenAPI schema, fuzzed over sockets: no 5xx, no traceback, and no status or body that it does not tell of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.app.conftest import NAME
from tests.app.live import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy
    from schemathesis import Case

    from tests.app.conftest import Scripted

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 40
"""Of each operation in each mode, which takes half a minute. With 500, and none of them a 5xx, it took four."""

MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.parametrize("mode", MODES, ids=["valid", "invalid"])
def test_whatever_the_schema_allows_or_forbids_is_answered_as_it_says(
    serve: Callable[..., Scripted], mode: GenerationMode
) -> None:
    server = serve(served_model_name=("*",))
    with client(server.server) as http:
        schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    operations = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    assert len(operations) > 12
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue
        fuzz(server.url, operation.as_strategy(generation_mode=mode))
        if "{session_id}" in operation.path:
            # An id made up is never one that is there.
            messages = [{"role": "user", "content": "tell me of mice and of their sleep " * 8}]
            with client(server.server) as http:
                http.post("/v1/chat/completions", json={"model": NAME, "messages": messages, "session_id": "s"})
            known = operation.as_strategy(generation_mode=mode, path_parameters={"session_id": "s"})
            fuzz(server.url, known)


def fuzz(url: str, cases: SearchStrategy[Case[Any]]) -> None:
    """Ask for one operation in many ways."""

    @seed(5)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def ask(case: Case[Any]) -> None:
        response = case.call(base_url=url, timeout=30)
        case.validate_response(response, checks=CHECKS)
        text = response.text
        assert "Traceback" not in text
        assert "site-packages" not in text
        if response.status_code >= 400 and case.method != "HEAD":
            of_anthropic = case.path.startswith("/v1/messages")
            keys = ["message", "type"] if of_anthropic else ["code", "message", "param", "type"]
            assert sorted(response.json()["error"]) == keys

    ask()
