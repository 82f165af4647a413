"""The official client against the real server and the embedded model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from models.embedded import NAME

if TYPE_CHECKING:
    from tests.app.live import Live

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


def sync_client(server: Live) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)


def async_client(server: Live) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)


def strict(answer: ChatCompletion) -> ChatCompletion:
    """The SDK itself builds objects without looking; this looks."""
    return ChatCompletion.model_validate(answer.model_dump(), strict=True)


def test_a_conversation_of_several_turns(fresh: Live) -> None:
    messages = list(MESSAGES)
    with sync_client(fresh) as client:
        for turn in range(1, 4):
            answer = client.chat.completions.create(
                model=NAME, messages=messages, temperature=0, max_tokens=10, extra_body={"session_id": "talk"}
            )
            strict(answer)
            assert answer.choices[0].message.content
            assert answer.model_extra is not None
            assert answer.model_extra["session"]["turn"] == turn
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached is not None
            assert (cached > 0) == (turn > 1)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Tell me more."},
            ]
    assert "Paris" in messages[1]["content"]


def test_a_stream_says_what_the_whole_answer_says(fresh: Live) -> None:
    with sync_client(fresh) as client:
        whole = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, max_tokens=16)
        chunks = list(
            client.chat.completions.create(
                model=NAME,
                messages=MESSAGES,
                temperature=0,
                max_tokens=16,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    extras = chunks[-2].model_extra
    assert extras is not None
    assert extras["session"]["miss_reason"]
    assert extras["timings"]["predicted_n"] == whole.usage.completion_tokens


def test_the_stream_helper_accumulates_an_answer(fresh: Live) -> None:
    with (
        sync_client(fresh) as client,
        client.chat.completions.stream(model=NAME, messages=MESSAGES, temperature=0, max_tokens=24) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].finish_reason == "stop"
    assert "Paris" in (final.choices[0].message.content or "")


async def test_the_async_client_streams_several_turns_at_once(fresh: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": f"Count to {number}."}],
            temperature=0,
            max_tokens=8,
            stream=True,
        )
        return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

    async with async_client(fresh) as client:
        texts = await asyncio.gather(*(ask(client, number) for number in range(4, 8)))
        assert texts[0] == await ask(client, 4)
    assert all(texts)


def test_the_raw_response_has_the_ids_in_its_headers(fresh: Live) -> None:
    with sync_client(fresh) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=NAME, messages=MESSAGES, max_tokens=1, extra_headers={"X-Session-ID": "run-42/planner"}
        )
        assert raw.headers["x-session-id"] == "run-42/planner"
        assert raw.request_id is not None
        assert raw.request_id.startswith("req_")
        assert strict(raw.parse()).id.startswith("chatcmpl-")


def test_errors_arrive_as_the_clients_own_exceptions(fresh: Live) -> None:
    with sync_client(fresh) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-missing", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "long " * 9000}])
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as stored:
            client.chat.completions.create(model=NAME, messages=MESSAGES, store=True)
        assert stored.value.param == "store"


def test_models_are_listed_with_their_context(fresh: Live) -> None:
    with sync_client(fresh) as client:
        (model,) = client.models.list().data
        assert model.id == NAME
        assert model.model_extra is not None
        assert model.model_extra["context_length"] == fresh.gateway.max_context
        assert client.models.retrieve(NAME).id == NAME


def test_a_seed_makes_an_answer_repeatable_and_stop_strings_never_show(fresh: Live) -> None:
    with sync_client(fresh) as client:

        def ask(seed: int, stop: str | None = None) -> ChatCompletion:
            return client.chat.completions.create(
                model=NAME, messages=MESSAGES, temperature=1.5, seed=seed, max_tokens=12, stop=stop
            )

        first, same, other = ask(1), ask(1), ask(2)
        text = first.choices[0].message.content or ""
        assert text == same.choices[0].message.content
        assert text != other.choices[0].message.content
        stop = text[9:12]
        cut = ask(1, stop)
        assert cut.choices[0].finish_reason == "stop"
        assert cut.choices[0].message.content == text[: text.index(stop)]
