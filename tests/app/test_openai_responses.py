"""The official client's Responses against the real server and the embedded model."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from app import startup
from app.settings import Settings
from models.embedded import NAME
from tests.app.forced import Forced
from tests.app.live import Live, live
from tests.app.test_openai_client import async_client, sync_client
from tests.app.test_responses import FLAT
from tests.app.test_tools import CALL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASK = "What is the capital of France?"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BLOCK = 32
FORCED = Forced(end_id=2)


@pytest.fixture(scope="module")
def server(cache_dir: Path) -> Iterator[Live]:
    opened = functools.partial(startup.opened, choose=FORCED)
    settings = Settings(model="embedded", hbm_bytes=64 * 1024**2, cache_dir=cache_dir, drain_seconds=5)
    with live(settings, opened) as running:
        yield running


@pytest.fixture
def clean(server: Live) -> Iterator[Live]:
    server.flush()
    yield server
    server.check_idle()


def strict(response: Response) -> Response:
    return Response.model_validate(response.model_dump(), strict=True)


def session(response: Response) -> dict[str, Any]:
    assert response.model_extra is not None
    found: dict[str, Any] = response.model_extra["session"]
    return found


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def reusable(response: Response) -> int:
    assert response.usage is not None
    return (response.usage.total_tokens - 1) // BLOCK * BLOCK


def test_a_chain_of_responses_reuses_each_block_of_what_was_said(clean: Live) -> None:
    with sync_client(clean) as client:
        last = client.responses.create(model=NAME, input=ASK, temperature=0, max_output_tokens=8)
        assert "Paris" in strict(last).output_text
        for turn in range(2, 4):
            answer = client.responses.create(
                model=NAME, input="Tell me more.", previous_response_id=last.id, temperature=0, max_output_tokens=8
            )
            strict(answer)
            assert (session(answer)["turn"], session(answer)["miss_reason"]) == (turn, None)
            assert cached(answer) == reusable(last)
            last = answer


def test_the_stream_helper_makes_the_response_that_create_returns(clean: Live) -> None:
    asked: Any = {"model": NAME, "input": ASK, "temperature": 0, "max_output_tokens": 24}
    with sync_client(clean) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        for event in events:
            EVENT.validate_python(event.model_dump(), strict=True)
        with client.responses.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    assert (
        final.output_text
        == whole.output_text
        == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    )
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert session(final)["stored_tokens"] >= 0


class Mood(BaseModel):
    mood: Literal["calm", "cross"]
    score: int
    words: list[Literal["a", "b"]]


def test_an_answer_is_parsed_into_a_model(clean: Live) -> None:
    FORCED.scripts[2] = clean.gateway.chat.plain_ids('{"mood": "calm", "score": 1, "words": ["a"]}')
    asked: Any = {"model": NAME, "input": "How is the cat?", "text_format": Mood, "extra_body": {"seed": 2}}
    with sync_client(clean) as client:
        answer = client.responses.parse(**asked)
        with client.responses.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_response()
    strict(answer)
    assert answer.output_parsed == streamed.output_parsed == Mood(mood="calm", score=1, words=["a"])


def test_an_answer_that_must_be_json_begins_as_such(clean: Live) -> None:
    with sync_client(clean) as client:
        answer = client.responses.create(
            model=NAME, input="JSON.", text={"format": {"type": "json_object"}}, temperature=0, max_output_tokens=4
        )
    assert answer.output_text.startswith("{")


def test_tools_are_called_and_answered_in_a_chain(clean: Live) -> None:
    FORCED.scripts[1] = clean.gateway.chat.plain_ids(CALL)
    with sync_client(clean) as client:
        first = client.responses.create(
            model=NAME,
            input="What is the weather in Paris?",
            tools=FLAT,
            temperature=0,
            extra_body={"seed": 1},  # type: ignore[arg-type]
        )
        (call,) = strict(first).output
        assert isinstance(call, ResponseFunctionToolCall)
        assert json.loads(call.arguments) == {"city": "Paris", "days": 1}
        second = client.responses.create(
            model=NAME,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}],
            previous_response_id=first.id,
            tools=FLAT,  # type: ignore[arg-type]
            temperature=0,
            max_output_tokens=8,
        )
    assert session(second)["miss_reason"] is None
    assert cached(second) == reusable(first)


def test_a_named_tool_is_called(clean: Live) -> None:
    FORCED.scripts[3] = clean.gateway.chat.plain_ids(CALL)
    with sync_client(clean) as client:
        answer = client.responses.create(
            model=NAME,
            input="The weather in Paris for one day.",
            tools=FLAT,  # type: ignore[arg-type]
            tool_choice={"type": "function", "name": "get_weather"},
            extra_body={"seed": 3},
        )
    (call,) = strict(answer).output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "get_weather"


def test_logprobs_are_of_the_text_alone(clean: Live) -> None:
    asked: Any = {"model": NAME, "input": ASK, "temperature": 0, "max_output_tokens": 6, "top_logprobs": 2}
    with sync_client(clean) as client:
        answer = strict(client.responses.create(include=["message.output_text.logprobs"], **asked))
        (item,) = answer.output
        assert item.type == "message"
        (part,) = item.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert "".join(one.token for one in part.logprobs) == part.text
        assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
        streamed = [
            token
            for event in client.responses.create(stream=True, **asked)
            if event.type == "response.output_text.delta"
            for token in event.logprobs
        ]
    assert [token.token for token in streamed] == [one.token for one in part.logprobs]


def test_a_conversation_of_the_clients_own(clean: Live) -> None:
    with sync_client(clean) as client:
        conversation = client.conversations.create()
        asked: Any = {"model": NAME, "conversation": conversation.id, "temperature": 0, "max_output_tokens": 8}
        first = client.responses.create(input=ASK, **asked)
        second = client.responses.create(input="And of Spain?", **asked)
        assert strict(second).conversation is not None
        assert cached(second) == reusable(first)
        client.conversations.delete(conversation.id)
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.create(input="And?", **asked)
    assert gone.value.param == "conversation"


async def test_the_async_client_streams_several_chains_at_once(clean: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> list[str]:
        texts: list[str] = []
        previous: str | None = None
        for _ in range(2):
            stream = await client.responses.create(
                model=NAME,
                input=f"Count to {number}.",
                temperature=0,
                max_output_tokens=3,
                previous_response_id=previous,
                stream=True,
            )
            *_, last = [event async for event in stream]
            assert last.type == "response.incomplete"
            final = last.response
            texts.append(final.output_text)
            previous = final.id
        return texts

    async with async_client(clean) as client:
        texts = await asyncio.gather(*(ask(client, number) for number in range(4, 7)))
        assert texts[0] == await ask(client, 4)
    assert all(text for pair in texts for text in pair)


def test_errors_arrive_as_the_clients_own_exceptions(clean: Live) -> None:
    with sync_client(clean) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(model=NAME, input=ASK, previous_response_id="resp_missing")
        assert missing.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=NAME, input=ASK, truncation="auto")
        assert refused.value.param == "truncation"
        with pytest.raises(openai.BadRequestError) as long:
            client.responses.create(model=NAME, input="long " * 9000)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
