"""The official client's Responses: against a scripted engine, and where K/V and logits matter the embedded model."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from models.embedded import NAME
from tests.app.conftest import BLOCK_TOKENS, Scripted
from tests.app.conftest import NAME as SCRIPTED
from tests.app.test_openai_client import async_client, sync_client
from tests.app.test_responses import FLAT
from tests.app.test_tools import CALL, speak

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerFast

    from tests.app.live import Live

    Serve = Callable[..., Scripted]

ASK = "What is the capital of France?"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BLOCK = 32


def strict(response: Response) -> Response:
    return Response.model_validate(response.model_dump(), strict=True)


def session(response: Response) -> dict[str, Any]:
    assert response.model_extra is not None
    found: dict[str, Any] = response.model_extra["session"]
    return found


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def reusable(response: Response, block_tokens: int = BLOCK_TOKENS) -> int:
    assert response.usage is not None
    return (response.usage.total_tokens - 1) // block_tokens * block_tokens


def test_a_chain_of_responses_reuses_each_block_of_what_was_said(fresh: Live) -> None:
    with sync_client(fresh) as client:
        last = client.responses.create(model=NAME, input=ASK, temperature=0, max_output_tokens=8)
        assert "Paris" in strict(last).output_text
        for turn in range(2, 4):
            answer = client.responses.create(
                model=NAME, input="Tell me more.", previous_response_id=last.id, temperature=0, max_output_tokens=4
            )
            strict(answer)
            assert (session(answer)["turn"], session(answer)["miss_reason"]) == (turn, None)
            assert cached(answer) == reusable(last, BLOCK)
            last = answer


def test_logprobs_are_of_the_text_alone(fresh: Live) -> None:
    asked: Any = {"model": NAME, "input": ASK, "temperature": 0, "max_output_tokens": 4, "top_logprobs": 2}
    with sync_client(fresh) as client:
        answer = strict(client.responses.create(include=["message.output_text.logprobs"], **asked))
        events = list(client.responses.create(stream=True, **asked))
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(one.token for one in part.logprobs) == part.text
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    streamed = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [token.token for token in streamed] == [one.token for one in part.logprobs]


def test_an_answer_that_must_be_json_begins_as_such(fresh: Live) -> None:
    with sync_client(fresh) as client:
        answer = client.responses.create(
            model=NAME, input="JSON.", text={"format": {"type": "json_object"}}, temperature=0, max_output_tokens=3
        )
    assert answer.output_text.startswith("{")


def test_the_stream_helper_makes_the_response_that_create_returns(serve: Serve) -> None:
    asked: Any = {"model": SCRIPTED, "input": ASK}
    with sync_client(serve().server) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        with client.responses.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
    for event in events:
        EVENT.validate_python(event.model_dump(), strict=True)
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    added_up = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert final.output_text == whole.output_text == added_up
    assert strict(final).usage is not None
    assert session(final)["stored_tokens"] >= 0


class Mood(BaseModel):
    mood: Literal["calm", "cross"]
    score: int
    words: list[Literal["a", "b"]]


def test_an_answer_is_parsed_into_a_model(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve()
    speak(server, tokenizer, '{"mood": "calm", "score": 1, "words": ["a"]}')
    asked: Any = {"model": SCRIPTED, "input": "How is the cat?", "text_format": Mood}
    with sync_client(server.server) as client:
        answer = client.responses.parse(**asked)
        with client.responses.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_response()
    assert answer.output_parsed == streamed.output_parsed == Mood(mood="calm", score=1, words=["a"])


def test_tools_are_called_and_answered_in_a_chain(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve()
    speak(server, tokenizer, CALL)
    asked: Any = {"model": SCRIPTED, "tools": FLAT}
    with sync_client(server.server) as client:
        first = client.responses.create(input="The weather in Paris?", tool_choice="auto", **asked)
        (call,) = strict(first).output
        assert isinstance(call, ResponseFunctionToolCall)
        assert json.loads(call.arguments) == {"city": "Paris", "days": 1}
        speak(server, tokenizer, "Rain.")
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
        second = client.responses.create(input=result, previous_response_id=first.id, **asked)
        assert session(second)["miss_reason"] is None
        assert cached(second) == reusable(first)
        speak(server, tokenizer, CALL)
        named = client.responses.create(
            input="Again.", tool_choice={"type": "function", "name": "get_weather"}, **asked
        )
    assert strict(named).output[0].type == "function_call"


def test_a_conversation_of_the_clients_own(serve: Serve) -> None:
    with sync_client(serve().server) as client:
        conversation = client.conversations.create()
        asked: Any = {"model": SCRIPTED, "conversation": conversation.id}
        first = client.responses.create(input=ASK, **asked)
        second = client.responses.create(input="And of Spain?", **asked)
        assert strict(second).conversation is not None
        assert cached(second) == reusable(first)
        client.conversations.delete(conversation.id)
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.create(input="And?", **asked)
    assert gone.value.param == "conversation"


async def test_the_async_client_runs_several_chains_at_once(serve: Serve) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> list[Response]:
        said: list[Response] = []
        for _ in range(2):
            previous: Any = {"previous_response_id": said[-1].id} if said else {}
            async with client.responses.stream(model=SCRIPTED, input=f"Count to {number}. " * 9, **previous) as stream:
                async for _event in stream:
                    pass
                said.append(await stream.get_final_response())
        return said

    async with async_client(serve().server) as client:
        chains = await asyncio.gather(*(ask(client, number) for number in range(4, 8)))
    assert len({session(first)["id"] for first, _ in chains}) == 4
    for first, second in chains:
        assert session(first)["id"] == session(second)["id"]
        assert cached(second) == reusable(first)


def test_errors_arrive_as_the_clients_own_exceptions(serve: Serve) -> None:
    with sync_client(serve().server) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(model=SCRIPTED, input=ASK, previous_response_id="resp_missing")
        assert missing.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=SCRIPTED, input=ASK, truncation="auto")
        assert refused.value.param == "truncation"
        with pytest.raises(openai.BadRequestError) as long:
            client.responses.create(model=SCRIPTED, input="long " * 9000)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
