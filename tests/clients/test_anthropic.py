"""The official `anthropic` client, unmodified, over several turns of a real model."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from models.embedded import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anthropic.types import MessageParam, ToolParam

    from tests.clients.conftest import Server

pytestmark = pytest.mark.clients

QUESTIONS = ("Name three small animals.", "Which of them sleeps longest?", "Say it in one word.")
FRANCE: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}
"""Of the protocol, and no argument of the client's any more."""

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@contextmanager
def connected(server: Server) -> Iterator[anthropic.Anthropic]:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, http_client=http) as client:
        yield client


def strict(answer: Message) -> Message:
    """The client itself builds objects without looking; this looks."""
    return Message.model_validate(answer.model_dump(), strict=True)


def text_of(answer: Message) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def session_of(answer: Message) -> dict[str, Any]:
    assert answer.model_extra is not None
    session: dict[str, Any] = answer.model_extra["session"]
    return session


def conversation(ask: Callable[[list[MessageParam]], tuple[Message, dict[str, Any]]]) -> None:
    """Put the questions one after the other: each turn computes only its own tokens, and usage says so."""
    messages: list[MessageParam] = []
    before = 0
    for turn, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        answer, session = ask(messages)
        messages.append({"role": "assistant", "content": answer.content})
        usage = answer.usage
        assert text_of(answer)
        assert session["turn"] == turn
        assert (session["miss_reason"] is None) == (turn > 1)
        reused, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert reused == sum(session["reused_tokens"].values())
        if turn > 1:
            assert before - 32 - 1 <= reused <= before
        before = usage.input_tokens + reused + written + usage.output_tokens


def test_a_conversation_without_streaming(server: Server) -> None:
    with connected(server) as client:

        def ask(messages: list[MessageParam]) -> tuple[Message, dict[str, Any]]:
            answer = client.messages.create(
                model=NAME, messages=messages, max_tokens=12, extra_body={"session_id": "plain-messages", **GREEDY}
            )
            strict(answer)
            return answer, session_of(answer)

        conversation(ask)


def test_a_conversation_by_stream_with_nothing_but_its_text_to_know_it_by(server: Server) -> None:
    with connected(server) as client:

        def ask(messages: list[MessageParam]) -> tuple[Message, dict[str, Any]]:
            told: dict[str, Any] = {}
            with client.messages.stream(model=NAME, messages=messages, max_tokens=12) as stream:
                for event in stream:
                    if event.type == "message_delta":
                        assert event.model_extra is not None
                        told = event.model_extra["session"]
                final = stream.get_final_message()
            return final, told

        conversation(ask)


def test_raw_events_are_what_the_client_knows_and_make_the_whole_answer(server: Server) -> None:
    with connected(server) as client:
        whole = client.messages.create(model=NAME, messages=FRANCE, max_tokens=12, extra_body=GREEDY)
        told = list(client.messages.create(model=NAME, messages=FRANCE, max_tokens=12, extra_body=GREEDY, stream=True))
    for event in told:
        EVENT.validate_python(event.model_dump(), strict=True)
    text = "".join(e.delta.text for e in told if e.type == "content_block_delta" and e.delta.type == "text_delta")
    assert text == text_of(whole)
    assert [event.type for event in told if event.type.startswith("message")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


async def test_the_asynchronous_client_asks_several_things_at_once(server: Server) -> None:
    async def ask(client: anthropic.AsyncAnthropic, number: int) -> str:
        question: list[MessageParam] = [{"role": "user", "content": f"Count to {number}."}]
        async with client.messages.stream(model=NAME, messages=question, max_tokens=8, extra_body=GREEDY) as stream:
            return await stream.get_final_text()

    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", http_client=http) as client:
        texts = await asyncio.gather(*(ask(client, number) for number in (4, 5, 6)))
        assert texts[0] == await ask(client, 4)
    assert all(texts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_used_is_used_and_its_result_answered_from_what_was_computed(
    server: Server, stream: bool
) -> None:
    name = f"tools-{stream}"
    fields: dict[str, Any] = {"model": NAME, "tools": [WEATHER]}
    fields["extra_body"] = {"session_id": name, **GREEDY}
    with connected(server) as client:
        asked: list[MessageParam] = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
        choice: Any = {"type": "tool", "name": "get_weather"}
        if stream:
            with client.messages.stream(messages=asked, tool_choice=choice, max_tokens=60, **fields) as events:
                used = events.get_final_message()
        else:
            used = client.messages.create(messages=asked, tool_choice=choice, max_tokens=60, **fields)
        strict(used)
        (call,) = used.content
        assert call.type == "tool_use"
        assert (used.stop_reason, call.name, sorted(call.input)) == ("tool_use", "get_weather", ["city", "days"])
        asked.append({"role": "assistant", "content": used.content})
        asked.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain, then sun."}]}
        )
        answer = client.messages.create(messages=asked, max_tokens=4, **fields)
    strict(answer)
    assert session_of(answer)["miss_reason"] is None
    assert session_of(answer)["recomputed_tokens"] < 32


def test_an_answer_is_held_to_a_schema(server: Server) -> None:
    wanted: Any = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    with connected(server) as client:
        answer = client.messages.create(
            model=NAME, messages=FRANCE, max_tokens=100, output_config={"format": wanted}, extra_body=GREEDY
        )
    assert text_of(answer).startswith('{"city": "')


def test_the_stop_sequence_that_was_met_is_named(server: Server) -> None:
    with connected(server) as client:
        answer = client.messages.create(
            model=NAME, messages=FRANCE, max_tokens=40, stop_sequences=["Rome", " Paris"], extra_body=GREEDY
        )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " Paris")
    assert "Paris" not in text_of(answer)


def test_counted_tokens_are_those_of_the_prompt(server: Server) -> None:
    with connected(server) as client:
        counted = client.messages.count_tokens(model=NAME, messages=FRANCE, system="Be brief.", tools=[WEATHER])
        answer = client.messages.create(model=NAME, messages=FRANCE, system="Be brief.", tools=[WEATHER], max_tokens=1)
    usage = answer.usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == prompt


def test_refusals_are_the_clients_own_exceptions(server: Server) -> None:
    with connected(server) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="claude-missing", messages=FRANCE, max_tokens=1)
        assert missing.value.type == "not_found_error"
        assert missing.value.request_id is not None
        picture: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="type 'image' are not supported"):
            client.messages.create(model=NAME, messages=[{"role": "user", "content": [picture]}], max_tokens=1)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model=NAME, messages=[{"role": "user", "content": "long " * 9000}], max_tokens=1)


def test_the_raw_response_has_the_ids_in_its_headers(server: Server) -> None:
    with connected(server) as client:
        raw = client.messages.with_raw_response.create(
            model=NAME, messages=FRANCE, max_tokens=1, extra_headers={"X-Session-ID": "run-42/messages"}
        )
        answer = raw.parse()
    assert raw.headers["x-session-id"] == "run-42/messages"
    assert answer._request_id == raw.headers["request-id"]
