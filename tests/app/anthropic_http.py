"""What tests of the Anthropic dialect share: strict answers, whole and streamed, over plain HTTP."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.app.conftest import NAME, Scripted
from tests.app.live import client

if TYPE_CHECKING:
    import httpx

URL = "/v1/messages"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def body(messages: Any = "hello there", **fields: Any) -> dict[str, Any]:
    told = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return {"model": NAME, "max_tokens": 100, "messages": told, **fields}


def post(server: Scripted, headers: dict[str, str] | None = None, path: str = URL, **fields: Any) -> httpx.Response:
    with client(server.server) as http:
        return http.post(path, json=body(**fields), headers=headers)


def ask(server: Scripted, messages: Any = "hello there", **fields: Any) -> dict[str, Any]:
    """A whole answer, which is what Anthropic's own model of it says, in every type."""
    response = post(server, messages=messages, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Message.model_validate(answer, strict=True)
    return answer


def events(text: str) -> list[dict[str, Any]]:
    """A stream's events, pings left out; each named as its type, and as Anthropic's model of it says."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    told = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event, strict=True)
        if event["type"] != "ping":
            told.append(event)
    return told


def streamed(server: Scripted, messages: Any = "hello there", **fields: Any) -> list[dict[str, Any]]:
    response = post(server, messages=messages, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def put_together(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make; fails on an order that the protocol does not have."""
    assert [told[0]["type"], told[-1]["type"]] == ["message_start", "message_stop"]
    message = told[0]["message"]
    is_open, arguments = False, ""
    for event in told[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                name = delta["type"].removesuffix("_delta")
                if name == "input_json":
                    arguments += delta["partial_json"]
                else:
                    block[name] = block[name] + delta[name]
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments or "{}")
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
                message["session"], message["timings"] = event["session"], event["timings"]
    return dict(message)
