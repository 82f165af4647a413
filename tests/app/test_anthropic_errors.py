"""Whatever goes wrong at a URL of the Anthropic dialect is told in Anthropic's form, whichever layer found it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic.types.shared import ErrorResponse
from pydantic import SecretStr

from app import anthropic_errors
from app.boundary import MAX_BODY_BYTES
from app.errors import ErrorReply, ModelNotFound, reply_for
from app.main import create_app
from app.settings import Settings
from kvstore.errors import ContextTooLong, QueueFull, SettingInvalid, ShuttingDown, TurnFailed
from models.errors import TemplateFailed
from tests.app.anthropic_http import URL, ask, body, events, post, put_together, streamed
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

Serve = Callable[..., Scripted]
KEY = "dm-alice-0123456789"
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def refused(response: httpx.Response, status: int, kind: str) -> str:
    """The sentence of a refusal that is one of Anthropic's in every key."""
    assert response.status_code == status, response.text
    error = response.json()
    assert list(error) == ["type", "error", "request_id"]
    assert list(error["error"]) == ["type", "message"]
    assert error["error"]["type"] == kind
    assert error["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    if kind != "request_too_large":  # documented, and missing in the client's own list
        ErrorResponse.model_validate(error, strict=True)
    message: str = error["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull(9, 1.25), 529, "overloaded_error"),
        (ContextTooLong(9000, 8192), 400, "invalid_request_error"),
        (ShuttingDown(), 503, "overloaded_error"),
        (TurnFailed("cuda:0 at 0xdeadbeef"), 500, "api_error"),
        (ModelNotFound("gpt", ["here"]), 404, "not_found_error"),
        (TemplateFailed("no"), 400, "invalid_request_error"),
        (SettingInvalid("--secret", "x"), 500, "api_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
    ],
)
def test_every_error_of_ours_is_one_of_anthropics(error: Exception, status: int, kind: str) -> None:
    reply = reply_for(error)
    told = json.loads(anthropic_errors.payload(reply, "req_1"))
    ErrorResponse.model_validate(told, strict=True)
    assert (anthropic_errors.status(reply), told["error"]["type"]) == (status, kind)
    assert "secret" not in told["error"]["message"]


def test_a_place_is_named_once() -> None:
    def message(reply: ErrorReply) -> Any:
        return json.loads(anthropic_errors.payload(reply, None))["error"]["message"]

    assert message(ErrorReply(400, "Invalid 'top_p': no.", param="top_p")) == "Invalid 'top_p': no."
    assert message(ErrorReply(400, "No such thing.", param="tools[0].type")) == "tools[0].type: No such thing."
    assert message(ErrorReply(400, "No such thing.")) == "No such thing."


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": list(blocks)}]}


TOOL = {"name": "f", "input_schema": {"type": "object"}}


def test_what_cannot_be_honoured_is_refused_by_name(serve: Serve) -> None:
    server = serve()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"max_tokens": -1}, "'max_tokens'"),
        ({"max_tokens": "9"}, "'max_tokens'"),
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": 5}]}, "'messages[0].content'"),
        (said(PICTURE), "messages[1].content[0].type: Content blocks of type 'image' are not supported"),
        (said({"type": "document", "source": {}}), "Content blocks of type 'document'"),
        (said({"type": "text"}), "messages[1].content[0].text: A block of type 'text' must have 'text'."),
        (said({"type": "text", "text": 5}), "'messages[1].content[0].text'"),
        (said({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "belongs to the assistant"),
        (said({"type": "tool_result"}, role="user"), "must have 'tool_use_id'"),
        (said({"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}), "'image' are not supported"),
        (said({"type": "tool_use", "id": "a", "name": "f", "input": {}}, role="assistant"), "no 'tool_result' follows"),
        (said({"type": "tool_use", "id": "a", "name": "f", "input": []}, role="assistant"), "content[0].input"),
        ({"system": [{"type": "image"}]}, "'system[0].type'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "Tools of type 'web_search_20250305'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "'tools[0].name'"),
        ({"tools": [{"name": "a"}]}, "'tools[0].input_schema'"),
        ({"tools": [TOOL, TOOL]}, "the same name"),
        ({"tool_choice": {"type": "any"}}, "there are no 'tools'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "must have a 'name'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "none of the 'tools'"),
        ({"thinking": {"type": "hard"}}, "'thinking.type'"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
        ({"stop_sequences": "a"}, "'stop_sequences'"),
        ({"temperature": 2.1}, "'temperature'"),
        ({"session_id": "a b"}, "'session_id'"),
        ({"service_tier": "priority"}, "'service_tier' is not supported"),
        ({"container": "c"}, "'container' is not supported"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "'mcp_servers' is not supported"),
        ({"cache_control": {"type": "forever"}}, "'cache_control.type'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"contentEncoding": "x"}}}},
            "'output_config.format.schema' cannot be honoured",
        ),
    ]  # fmt: skip
    with client(server.server) as http:
        for fields, words in wrong:
            told = {name: value for name, value in {**body(), **fields}.items() if value is not None}
            assert words in refused(http.post(URL, json=told), 400, "invalid_request_error")
    assert server.engine.specs == []


def test_what_asks_for_nothing_is_taken(serve: Serve) -> None:
    server = serve()
    benign: dict[str, Any] = {
        "service_tier": "auto",
        "container": None,
        "speed": "standard",
        "mcp_servers": [],
        "context_management": {"edits": []},
        "user_profile_id": "someone",
        "a_field_of_the_future": {"a": 1},
        "thinking": None,
        "tools": [],
        "metadata": {"user_id": None},
        "betas": ["a"],
    }
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "a,b", "x-api-key": "anything"}
    assert post(server, headers, **benign).status_code == 200


def test_bodies_that_are_none_and_urls_that_are_none(serve: Serve) -> None:
    server = serve()
    as_json = {"content-type": "application/json"}
    with client(server.server) as http:

        def send(content: bytes, headers: dict[str, str] = as_json) -> httpx.Response:
            return http.post(URL, content=content, headers=headers)

        invalid = "invalid_request_error"
        assert "not valid JSON" in refused(send(b"{"), 400, invalid)
        assert "must be a JSON object" in refused(send(b"[]"), 400, invalid)
        assert "NUL" in refused(send(b'{"model": "\\u0000"}'), 400, invalid)
        assert "nested deeper" in refused(send(b'{"tools": ' + b"[" * 99 + b"]" * 99 + b"}"), 400, invalid)
        refused(send(b"{}", {"content-type": "text/plain"}), 415, invalid)
        refused(send(b"{}", {**as_json, "origin": "https://elsewhere.example"}), 403, "permission_error")
        refused(send(b"{}", {**as_json, "host": "elsewhere.example"}), 403, "permission_error")
        refused(http.get(URL), 405, invalid)
        refused(http.post(f"{URL}/batches", json={}), 404, "not_found_error")
        assert "param" in http.get("/v1/messages-of-others").json()["error"]  # OpenAI's, as everywhere else


async def test_a_body_that_is_too_large_is_told_without_reading_it() -> None:
    transport = httpx.ASGITransport(create_app(Settings()))
    headers = {"content-type": "application/json", "content-length": str(MAX_BODY_BYTES + 1)}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        refused(await http.post(URL, content=b"{}", headers=headers), 413, "request_too_large")


def test_a_model_that_is_not_served_is_not_found(serve: Serve) -> None:
    server = serve()
    for path in (URL, f"{URL}/count_tokens"):
        assert "claude-9" in refused(post(server, path=path, model="claude-9"), 404, "not_found_error")


def test_keys_and_their_rates(serve: Serve) -> None:
    server = serve(api_keys=SecretStr(f"alice={KEY}"), key_requests_per_minute=2)
    refused(post(server), 401, "authentication_error")
    refused(post(server, {"x-api-key": "dm-nobody-0123456789"}), 401, "authentication_error")
    for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
        assert post(server, headers).status_code == 200
    spent = post(server, {"x-api-key": KEY})
    refused(spent, 429, "rate_limit_error")
    assert int(spent.headers["retry-after"]) >= 1


def test_a_prompt_that_cannot_fit_says_so_in_the_words_that_agents_look_for(serve: Serve) -> None:
    message = refused(post(serve(max_context=64), messages="long " * 99), 400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")


def test_a_full_queue_is_an_overload(serve: Serve) -> None:
    server = serve(max_running=1, max_queue=1)
    server.pause()
    replies: list[httpx.Response] = []
    waiting = [threading.Thread(target=lambda: replies.append(post(server))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    manager, queue = server.server.gateway.manager, server.server.gateway.queue
    server.server.wait_until(lambda: manager.snapshot().turns.granted == 1)
    server.server.wait_until(lambda: queue.waiting + manager.snapshot().turns.waiting == 1)
    full = post(server, stream=True)
    refused(full, 529, "overloaded_error")
    assert int(full.headers["retry-after"]) >= 1
    server.go_on()
    for thread in waiting:
        thread.join()
    assert [reply.status_code for reply in replies] == [200, 200]


def test_a_turn_that_fails_is_an_error_of_the_api_before_and_within_a_stream(serve: Serve) -> None:
    server = serve()
    server.engine.fail = "RuntimeError: secret of the inside"
    assert "secret" not in refused(post(server, session_id="a"), 500, "api_error")
    server.engine.fail_after_steps = server.engine.steps + 2
    told = events(post(server, stream=True, session_id="a").text)
    server.engine.fail = ""
    assert [event["type"] for event in told[:2]] == ["message_start", "content_block_start"]
    assert told[-1]["type"] == "error"
    ErrorResponse.model_validate(told[-1], strict=True)
    assert told[-1]["error"]["type"] == "api_error"
    assert told[-1]["request_id"].startswith("req_")
    assert ask(server, session_id="a")["model"] == NAME
    assert put_together(streamed(server))["stop_reason"] == "end_turn"
