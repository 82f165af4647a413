"""`POST /v1/responses`: items in, items and typed events out, whole and streamed alike."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.response_items import sealed
from tests.app.conftest import BLOCK_TOKENS, NAME, Scripted
from tests.app.live import client
from tests.app.test_tools import CALL, CALLS, say, speak
from tests.models.test_tool_templates import ARGUMENTS, QWEN, TOOLS

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerFast

__all__ = ["say"]

URL = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_TOOLS: Any = TOOLS
FLAT: list[dict[str, Any]] = [{"type": "function", **tool["function"]} for tool in _TOOLS]
ASK = "What is the weather in Paris?"


def body(asked: Any = ASK, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": asked, **fields}


def post(server: Scripted, asked: Any = ASK, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    with client(server.server) as http:
        return http.post(URL, json=body(asked, **fields), headers=headers)


def ask(server: Scripted, asked: Any = ASK, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    response = post(server, asked, headers, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate(answer, strict=True)
    return answer


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream: named as their types say, numbered from 0, and each as OpenAI's own type has it."""
    found: list[dict[str, Any]] = []
    for block in text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        EVENT.validate_python(event, strict=True)
        found.append(event)
    return found


def stream(server: Scripted, asked: Any = ASK, **fields: Any) -> list[dict[str, Any]]:
    response = post(server, asked, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client that only adds up deltas has it."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", ()))
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert items[event["output_index"]]["content"][0]["text"] == event["text"]
            case "response.output_item.done":
                assert event["item"]["id"] == items[event["output_index"]]["id"]
                items[event["output_index"]]["status"] = event["item"]["status"]
    return items


def nameless(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def text_of(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


def test_an_answer_is_a_response_with_a_message(serve: Callable[..., Scripted]) -> None:
    server = serve()
    answer = ask(server, instructions="Count.", metadata={"run": "7"}, max_output_tokens=99, prompt_cache_key="k")
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", NAME)
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert text_of(answer) == "One two three four five"
    assert (answer["instructions"], answer["metadata"]) == ("Count.", {"run": "7"})
    assert (answer["max_output_tokens"], answer["prompt_cache_key"]) == (99, "k")
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert answer["session"]["miss_reason"] == "new_session"
    assert answer["timings"]["predicted_n"] == answer["usage"]["output_tokens"]


THOUGHT = "<think>\nHe means France.\n</think>\n\n"


@pytest.mark.parametrize(
    ("said", "template", "kinds"),
    [
        ("One two", None, ["message"]),
        (CALLS, None, ["message", "function_call", "function_call"]),
        (CALL, QWEN, ["function_call"]),
        (THOUGHT + "Paris.", QWEN, ["reasoning", "message"]),
        (THOUGHT + CALLS, QWEN, ["reasoning", "message", "function_call", "function_call"]),
        ("", None, ["message"]),
    ],
    ids=["text", "calls", "a call alone", "a thought", "all of them", "nothing"],
)
@pytest.mark.parametrize("extras", [{}, {"top_logprobs": 0, "stream_options": {"include_obfuscation": True}}])
def test_a_stream_tells_what_the_whole_response_tells(
    say: Callable[..., Scripted], said: str, template: str | None, kinds: list[str], extras: dict[str, Any]
) -> None:
    server = say(said, template)
    include = ["reasoning.encrypted_content"]
    plain = {name: value for name, value in extras.items() if name != "stream_options"}
    whole = ask(server, tools=FLAT, include=include, **plain)
    assert [item["type"] for item in whole["output"]] == kinds
    events = stream(server, tools=FLAT, include=include, **extras)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["session"]["id"] == events[-1]["response"]["session"]["id"]
    assert events[-1]["type"] == "response.completed"
    last = events[-1]["response"]
    assert nameless(last["output"]) == nameless(whole["output"])
    sealing = {"encrypted_content": sealed("He means France.")}
    added_up = [item | (sealing if item["type"] == "reasoning" else {}) for item in rebuilt(events)]
    assert added_up == last["output"]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert last["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]
    assert any("obfuscation" in event for event in events) == ("stream_options" in extras and bool(said))


def test_calls_and_thoughts_are_items_of_their_own(say: Callable[..., Scripted]) -> None:
    answer = ask(say(THOUGHT + CALLS, QWEN), tools=FLAT)
    thought, message, first, second = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "He means France."}]
    assert thought["summary"] == []
    assert "encrypted_content" not in thought
    assert message["content"][0]["text"] == "Let me look."
    assert (first["name"], first["arguments"]) == ("get_weather", ARGUMENTS)
    assert (second["name"], second["arguments"]) == ("get_time", "{}")
    assert first["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 3


def test_an_answer_that_is_cut_short_is_incomplete(serve: Callable[..., Scripted]) -> None:
    server = serve()
    answer = ask(server, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    events = stream(server, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"


def test_a_prompt_computed_ahead_is_completed_and_empty(serve: Callable[..., Scripted]) -> None:
    server = serve()
    answer = ask(server, "many words " * 40, prompt_cache_options={"prewarm": True})
    assert (answer["status"], answer["output"]) == ("completed", [])
    again = ask(server, "many words " * 40)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("template", [None, QWEN], ids=["described", "native"])
@pytest.mark.parametrize("sealed_only", [False, True], ids=["in clear", "sealed"])
def test_items_sent_back_continue_the_turn_however_their_json_is_spelled(
    say: Callable[..., Scripted], tokenizer: PreTrainedTokenizerFast, template: str | None, sealed_only: bool
) -> None:
    said = (THOUGHT if template else "") + CALL
    server = say(said, template)
    keeping: dict[str, Any] = {"store": False, "tools": FLAT, "include": ["reasoning.encrypted_content"]}
    items: list[Any] = [{"role": "user", "content": ASK}]
    answer = ask(server, items, **keeping)
    for item in answer["output"]:
        if item["type"] == "function_call":
            item["arguments"] = json.dumps(json.loads(item["arguments"]), sort_keys=True, separators=(",", ":"))
        if item["type"] == "reasoning" and sealed_only:
            item["content"] = None
    called = answer["output"][-1]["call_id"]
    items += [*answer["output"], {"type": "function_call_output", "call_id": called, "output": "Rain."}]
    speak(server, tokenizer, "It rains.")
    second = ask(server, items, **keeping)
    assert second["session"]["id"] == answer["session"]["id"]
    assert second["session"]["miss_reason"] is None, second["session"]
    history = answer["usage"]["total_tokens"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == (history - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_logprobs_are_told_of_the_text(serve: Callable[..., Scripted]) -> None:
    server = serve()
    answer = ask(server, include=["message.output_text.logprobs"])
    assert answer["output"][0]["content"][0]["logprobs"] == []  # the scripted engine notes none


def test_what_the_answer_was_to_look_like_is_repeated_in_it(
    serve: Callable[..., Scripted], tokenizer: PreTrainedTokenizerFast
) -> None:
    server = serve()
    speak(server, tokenizer, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    written = {"type": "json_schema", "name": "An_a", "schema": schema, "strict": True, "description": None}
    answer = ask(server, text={"format": written}, tools=FLAT, tool_choice={"type": "function", "name": "get_time"})
    assert answer["text"]["format"] == written
    assert answer["tool_choice"] == {"type": "function", "name": "get_time"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    assert ask(server, tools=FLAT, tool_choice=allowed)["tool_choice"] == allowed
    assert ask(server, text={"format": {"type": "json_object"}})["text"]["format"] == {"type": "json_object"}


def test_tools_of_other_kinds_are_passed_over_and_the_answer_shows_it(serve: Callable[..., Scripted]) -> None:
    foreign = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}]
    answer = ask(serve(), tools=[*foreign, *FLAT])
    assert [tool["name"] for tool in answer["tools"]] == [tool["name"] for tool in FLAT]


def test_calls_of_custom_tools_in_the_input_are_read(serve: Callable[..., Scripted]) -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    ask(serve(), [{"role": "user", "content": "patch"}, call, result])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "a" * 300, "arguments": "{}"}]}, "input[0]"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"include": ["everything"]}, "include[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [FLAT[0], FLAT[0]]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "none_such"}, "tools": FLAT}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}, "tools": FLAT}, "tool_choice.type"),
    ({"previous_response_id": "resp_a", "conversation": "conv_a"}, "conversation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"input": "long " * 9000}, "input"),
]


def test_what_cannot_be_honoured_is_refused_by_its_name(serve: Callable[..., Scripted]) -> None:
    server = serve()
    with client(server.server) as http:
        for fields, param in REFUSED:
            response = http.post(URL, json=body() | fields)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param, error
            assert "'messages'" not in error["message"]
            assert "response_format" not in error["message"]


def test_a_stream_that_fails_on_its_way_ends_with_a_failed_response(serve: Callable[..., Scripted]) -> None:
    server = serve()
    server.engine.fail, server.engine.fail_after_steps = "on purpose", 2
    events = stream(server)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
