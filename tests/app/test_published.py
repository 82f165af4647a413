"""Every body and every chunk, on every path, is what OpenAI published: strictly, and with our listed keys alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from models.embedded import NAME
from tests.app import conftest
from tests.app.live import Live, client
from tests.app.published import error_of, published, stream, whole
from tests.app.test_answers import events
from tests.app.test_tools import CALL, CALLS, say
from tests.models.test_tool_templates import QWEN, TOOLS

if TYPE_CHECKING:
    import httpx

    from tests.app.conftest import Scripted

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "get_time"}}

__all__ = ["say"]  # the fixture


def asked(http: httpx.Client, route: str, fields: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The same request whole and streamed with usage."""
    response = http.post(route, json=fields)
    assert response.status_code == 200, response.text
    told = http.post(route, json={**fields, "stream": True, "stream_options": {"include_usage": True}})
    return whole(response.text), stream(told.text, usage=True)


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, {"stop", "length"}),
        ({"max_tokens": 1}, {"length"}),
        ({"max_tokens": 0}, {"length"}),
        ({"prompt_cache_options": {"prewarm": True}}, {"length"}),
        ({"stop": [" capital"]}, {"stop"}),
        ({"n": 2, "seed": 1, "temperature": 1.0}, {"stop", "length"}),
        ({"logprobs": True}, {"stop", "length"}),
        ({"logprobs": True, "top_logprobs": 3, "n": 2, "max_tokens": 3, "stop": ["is"]}, {"stop", "length"}),
        ({"response_format": {"type": "json_object"}}, {"stop", "length"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"stop", "length"},
        ),
        ({"tools": TOOLS, "tool_choice": "required", "max_tokens": 12}, {"tool_calls", "length"}),
        ({"tools": TOOLS[1:], "tool_choice": NAMED, "max_tokens": 12, "logprobs": True}, {"stop", "length"}),
        ({"tools": TOOLS, "tool_choice": "none"}, {"stop", "length"}),
        ({"cache_prompt": False}, {"stop", "length"}),
        ({"session_id": "a", "parent_session_id": "b", "session": {"final": True}}, {"stop", "length"}),
        ({"messages": [*ASK, {"role": "assistant", "content": "The"}], "continue_final_message": True}, {"length"}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_chat_completion_of_the_model(fresh: Live, fields: dict[str, Any], reasons: set[str]) -> None:
    body = {"model": NAME, "messages": ASK, "temperature": 0, "max_tokens": 4, **fields}
    with client(fresh) as http:
        answer, chunks = asked(http, CHAT, body)
    assert {choice["finish_reason"] for choice in answer["choices"]} <= reasons
    told = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert set(told) - {None} <= reasons


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ["The sky", "A rose"], "n": 2, "max_tokens": 2},
        {"prompt": [1, 2, 3], "max_tokens": 0},
        {"echo": True, "logprobs": 2},
        {"logprobs": 0, "stop": [" is"]},
        {"n": 2, "seed": 3, "temperature": 1.0, "logprobs": 1},
        {"guided_regex": "[0-9]{2}"},
    ],
    ids=lambda value: "-".join(value) or "plain",
)
def test_a_text_completion_of_the_model(fresh: Live, fields: dict[str, Any]) -> None:
    with client(fresh) as http:
        asked(http, TEXT, {"model": NAME, "prompt": "The sky is", "temperature": 0, "max_tokens": 3, **fields})


@pytest.mark.parametrize("template", [None, QWEN], ids=["described", "native"])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (CALL, {"tools": TOOLS}),
        (CALLS, {"tools": TOOLS}),
        (CALLS, {"tools": TOOLS, "parallel_tool_calls": False}),
        (CALL, {"tools": TOOLS, "max_tokens": 12}),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}),
        (f"<think>\nHm.\n</think>\n\nYes.\n{CALL}", {"tools": TOOLS, "n": 2}),
        ("<think>\nHm, and on", {"max_tokens": 4}),
        ("", {}),
    ],
)
def test_calls_and_thoughts(
    say: Callable[..., Scripted], template: str | None, text: str, fields: dict[str, Any]
) -> None:
    server = say(text, template)
    with client(server.server) as http:
        body = {"model": conftest.NAME, "messages": ASK, **fields}
        asked(http, CHAT, body)
        stream(http.post(CHAT, json={**body, "stream": True}).text, usage=False)


@pytest.mark.parametrize(
    ("route", "fields", "status", "param", "code"),
    [
        (CHAT, {"model": "other"}, 404, "model", "model_not_found"),
        (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
        (CHAT, {"messages": None}, 400, "messages", "invalid_value"),
        (CHAT, {"temperature": "hot"}, 400, "temperature", "invalid_value"),
        (CHAT, {"n": 17}, 400, "n", "invalid_value"),
        (CHAT, {"store": True}, 400, "store", None),
        (CHAT, {"messages": [{"role": "user", "content": "long " * 4000}]}, 400, "messages", "context_length_exceeded"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
         400, "response_format", None),
        (TEXT, {"suffix": "x"}, 400, "suffix", None),
        (TEXT, {"prompt": "a", "logprobs": 99}, 400, "logprobs", "invalid_value"),
        ("/v1/embeddings", {"input": "a"}, 404, None, None),
        ("/v1/nothing", {}, 404, None, "unknown_url"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal(
    serve: Callable[..., Scripted],
    route: str,
    fields: dict[str, Any],
    status: int,
    param: str | None,
    code: str | None,
    streams: bool,
) -> None:
    server = serve()
    with client(server.server) as http:
        response = http.post(route, json={"model": conftest.NAME, "messages": ASK, "stream": streams, **fields})
    assert response.status_code == status, response.text
    error = error_of(response.json())
    assert error.message
    assert param is None or (error.param or "").startswith(param)
    assert code is None or error.code == code


@pytest.mark.parametrize("after", [0, 3])
def test_a_failure_is_an_error_whole_and_in_a_stream(serve: Callable[..., Scripted], after: int) -> None:
    server = serve()
    server.engine.fail, server.engine.fail_after_steps = "broken", after
    with client(server.server) as http:
        response = http.post(CHAT, json={"model": conftest.NAME, "messages": ASK, "stream": True})
        failed = http.post(CHAT, json={"model": conftest.NAME, "messages": ASK})
    assert failed.status_code == 500
    assert error_of(failed.json()).code == "turn_failed"
    *chunks, last = events(response.text)
    assert len(chunks) == 1 + after  # the role, then a word a step
    for chunk in chunks:
        published(ChatCompletionChunk, chunk)
    assert error_of(last).code == "turn_failed"


def test_what_was_not_published_would_be_seen() -> None:
    answer = {
        "id": "a",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    }
    published(ChatCompletion, answer)
    with pytest.raises(AssertionError, match=r"ChatCompletion\.mood"):
        published(ChatCompletion, {**answer, "mood": "sleepy"})
    with pytest.raises(ValidationError):
        published(ChatCompletion, {**answer, "created": "1"})
    with pytest.raises(ValidationError):
        published(ChatCompletion, {**answer, "choices": [{**answer["choices"][0], "finish_reason": "tired"}]})  # type: ignore[index]
