"""The official `openai` client, unmodified, over several turns of a real model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

    from tests.clients.conftest import Server

QUESTIONS = ("Name three small animals.", "Which of them sleeps longest?", "Say it in one word.")


@pytest.fixture
def model(server: Server) -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        return client.models.list().data[0].id


def conversation(ask: Callable[[list[ChatCompletionMessageParam]], tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Put the questions one after the other; the `session` object of each answer."""
    messages: list[ChatCompletionMessageParam] = []
    sessions = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        text, session = ask(messages)
        assert text
        messages.append({"role": "assistant", "content": text})
        sessions.append(session)
    return sessions


def assert_each_turn_computes_only_its_own_tokens(sessions: list[dict[str, Any]]) -> None:
    """From the second turn on what was not reused of the history is less than one block."""
    assert [session["turn"] for session in sessions] == [1, 2, 3]
    assert len({session["id"] for session in sessions}) == 1
    for session in sessions[1:]:
        assert session["miss_reason"] is None
        assert sum(session["reused_tokens"].values()) > 0
        assert session["recomputed_tokens"] < 32


def session_of(reply: ChatCompletion) -> dict[str, Any]:
    assert reply.model_extra is not None
    session: dict[str, Any] = reply.model_extra["session"]
    return session


def test_a_conversation_without_streaming(server: Server, model: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:

        def ask(messages: list[ChatCompletionMessageParam]) -> tuple[str, dict[str, Any]]:
            reply = client.chat.completions.create(
                model=model, messages=messages, max_tokens=40, temperature=0, extra_body={"session_id": "plain"}
            )
            assert reply.usage is not None
            assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
            return reply.choices[0].message.content or "", session_of(reply)

        assert_each_turn_computes_only_its_own_tokens(conversation(ask))


def test_a_conversation_by_stream(server: Server, model: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:

        def ask(messages: list[ChatCompletionMessageParam]) -> tuple[str, dict[str, Any]]:
            text, last = "", {}
            for chunk in client.chat.completions.create(
                model=model, messages=messages, max_tokens=40, stream=True, extra_body={"session_id": "stream"}
            ):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    if choice.finish_reason is not None and chunk.model_extra is not None:
                        last = chunk.model_extra["session"]
            return text, last

        assert_each_turn_computes_only_its_own_tokens(conversation(ask))


async def test_an_asynchronous_conversation_with_no_session_id(server: Server, model: str) -> None:
    sessions = []
    messages: list[ChatCompletionMessageParam] = []
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        for question in ("What is a dormouse?", *QUESTIONS[1:]):
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=40)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            sessions.append(session_of(reply))
    assert_each_turn_computes_only_its_own_tokens(sessions)


def test_a_raw_response_carries_the_session_id_in_its_headers(server: Server, model: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        raw = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=4,
            extra_headers={"X-Session-ID": "raw/1"},
        )
    assert raw.headers["x-session-id"] == "raw/1"
    assert session_of(raw.parse())["id_source"] == "header:x-session-id"


def test_a_refusal_is_the_clients_own_exception(server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client,
        pytest.raises(openai.NotFoundError) as caught,
    ):
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.code == "model_not_found"
