"""Tools over HTTP: calls whole and streamed, the next turn's reuse, and reasoning apart from content."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from models.chat import ChatTemplate
from tests.app.conftest import BLOCK_TOKENS, NAME, Scripted
from tests.app.live import client
from tests.app.test_answers import URL, events
from tests.models.test_tool_templates import ARGUMENTS, QWEN, TOOLS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Serve = Callable[..., Scripted]
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALLS = f'Let me look.\n{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture
def say(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Scripted]:
    """A server whose model says a text, token by token; `template` is its chat template."""

    def start(text: str, template: str | None = None) -> Scripted:
        server = serve()
        speak(server, tokenizer, text)
        if template is not None:
            other = copy.deepcopy(tokenizer)
            other.chat_template = template
            server.server.gateway.chat = ChatTemplate(other)
        return server

    return start


def speak(server: Scripted, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    backend = tokenizer.backend_tokenizer
    words = [backend.decode([token_id]) for token_id in backend.encode(text, add_special_tokens=False).ids]
    server.engine.script = lambda _spec: words


def body(messages: Any = ASK, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": messages, "tools": TOOLS, **fields}


def ask(server: Scripted, messages: Any = ASK, **fields: Any) -> dict[str, Any]:
    with client(server.server) as http:
        response = http.post(URL, json=body(messages, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    ChatCompletion.model_validate(answer, strict=True)
    return answer


def streamed(server: Scripted, **fields: Any) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """The message that a stream's deltas make, its finish reason, and the deltas."""
    with client(server.server) as http:
        response = http.post(URL, json=body(stream=True, **fields))
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(copy.deepcopy(call))
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, chunks[-1]["choices"][0]["finish_reason"], [chunk["choices"][0]["delta"] for chunk in chunks]


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.parametrize("template", [None, QWEN], ids=["described", "native"])
def test_calls_are_told_whole_and_in_parts_alike(say: Callable[..., Scripted], template: str | None) -> None:
    server = say(CALLS, template)
    choice = ask(server)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert called(choice["message"]) == [("get_weather", ARGUMENTS), ("get_time", "{}")]
    message, reason, deltas = streamed(server)
    assert (message["content"], reason) == ("Let me look.", "tool_calls")
    assert called(message) == called(choice["message"])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in message["tool_calls"])
    assert sum("tool_calls" in delta for delta in deltas) > 6
    assert "tool_call>" not in json.dumps([delta.get("content") for delta in deltas])


def test_a_message_of_calls_alone_has_no_content(say: Callable[..., Scripted]) -> None:
    message = ask(say(CALL))["choices"][0]["message"]
    assert message["content"] is None


@pytest.mark.parametrize("template", [None, QWEN], ids=["described", "native"])
@pytest.mark.parametrize("named", [True, False], ids=["by-id", "by-text"])
def test_the_next_turn_reuses_the_call_however_the_client_spells_it(
    say: Callable[..., Scripted], tokenizer: PreTrainedTokenizerFast, template: str | None, named: bool
) -> None:
    server = say(CALL, template)
    fields = {"session_id": "a"} if named else {}
    message = ask(server, **fields)["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), sort_keys=True, separators=(",", ":"))
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
    speak(server, tokenizer, "It rains.")
    second = ask(server, [*ASK, message, result], **fields)
    session = second["session"]
    assert (session["turn"], session["miss_reason"], session["diverged"]) == (2, None, None)
    assert session["recomputed_tokens"] < BLOCK_TOKENS
    assert session["id_source"] == ("body" if named else "text")
    assert second["choices"][0]["message"]["content"] == "It rains."
    more = [*ASK, message, result, second["choices"][0]["message"], {"role": "user", "content": "Thanks."}]
    assert ask(server, more, **fields)["session"]["miss_reason"] is None


def test_without_a_choice_to_call_the_answer_is_text(say: Callable[..., Scripted]) -> None:
    choice = ask(say(CALL), tool_choice="none")["choices"][0]
    assert choice["message"]["content"] == CALL
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


def test_one_call_at_a_time_is_one_call(say: Callable[..., Scripted]) -> None:
    server = say(CALLS)
    assert called(ask(server, parallel_tool_calls=False)["choices"][0]["message"]) == [("get_weather", ARGUMENTS)]
    assert called(streamed(server, parallel_tool_calls=False)[0]) == [("get_weather", ARGUMENTS)]


def test_a_call_cut_off_by_the_limit_says_so(say: Callable[..., Scripted]) -> None:
    choice = ask(say(CALL), max_tokens=16)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_reasoning_is_told_apart_and_counted(say: Callable[..., Scripted]) -> None:
    server = say("<think>\nHm, what now?\n</think>\n\nRain.", QWEN)
    whole = ask(server, tools=None)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, what now?", "Rain.")
    assert 5 <= whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    parts, _, deltas = streamed(server, tools=None)
    assert (parts["reasoning_content"], parts["content"]) == ("Hm, what now?", "Rain.")
    assert not any("think" in str(delta) or "<" in str(delta.get("content")) for delta in deltas)


def test_reasoning_and_a_call_within_one_turn_are_spliced_when_the_client_returns_both(
    say: Callable[..., Scripted], tokenizer: PreTrainedTokenizerFast
) -> None:
    server = say(f"<think>\nI must look.\n</think>\n\n{CALL}", QWEN)
    message = ask(server, session_id="a")["choices"][0]["message"]
    assert message["reasoning_content"] == "I must look."
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
    speak(server, tokenizer, "Rain.")
    assert ask(server, [*ASK, message, result], session_id="a")["session"]["miss_reason"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_what_no_tool_can_be_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    server = serve()
    with client(server.server) as http:
        response = http.post(URL, json={**body(), **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
