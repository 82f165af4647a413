"""What a request may say, what is refused by name, and how the refusal names it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.fields import CHAT_NOT_BUILT
from app.schema import ChatRequest
from app.session_bodies import SessionPatch
from kvstore.terms import SILENT, Change, Persist, Wishes


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def first_error(fields: dict[str, Any]) -> tuple[tuple[object, ...], dict[str, Any], str]:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(fields)
    error = caught.value.errors()[0]
    return error["loc"], error.get("ctx", {}), error["msg"]


def test_a_minimal_request_leaves_every_choice_to_the_model() -> None:
    request = ChatRequest.model_validate(body())
    assert request.output_limit is None
    assert request.temperature is None
    assert request.messages[0].content == "hi"


def test_unknown_fields_are_ignored() -> None:
    ChatRequest.model_validate(
        body(future_field={"a": 1}, nvext={}, messages=[{"role": "user", "content": "x", "y": 1}])
    )


@pytest.mark.parametrize("name", sorted(CHAT_NOT_BUILT))
def test_values_that_ask_for_nothing_are_accepted(name: str) -> None:
    for value in (None, *CHAT_NOT_BUILT[name]):
        ChatRequest.model_validate(body(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "a"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("moderation", {}),
        ("service_tier", "flex"),
        ("store", True),
    ],
)
def test_what_is_known_and_not_built_is_refused_by_name(name: str, value: object) -> None:
    _, context, message = first_error(body(**{name: value}))
    assert context["param"] == name
    assert name in message


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = ChatRequest.model_validate(body(messages=[{"role": "user", "content": parts}]))
    assert request.messages[0].content == "one\ntwo"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "[0].type"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "[1].type"),
        ([{"type": "text"}], "[0].text"),
        (["bare"], "[0]"),
    ],
)
def test_other_content_parts_are_refused_where_they_stand(content: object, param: str) -> None:
    loc, context, _ = first_error(body(messages=[{"role": "user", "content": content}]))
    assert loc == ("messages", 0, "content")
    assert context["param"] == param


@pytest.mark.parametrize("content", [None, 5, {"type": "text"}, "\ud800"])
def test_content_is_text(content: object) -> None:
    loc, _, _ = first_error(body(messages=[{"role": "user", "content": content}]))
    assert loc == ("messages", 0, "content")


def test_lone_surrogates_hidden_in_a_part_are_no_text_either() -> None:
    hidden = json.loads('[{"type": "text", "text": "a\\ud800"}]')
    loc, _, _ = first_error(body(messages=[{"role": "user", "content": hidden}]))
    assert loc == ("messages", 0, "content")


def test_an_assistant_message_without_text_is_an_empty_one() -> None:
    request = ChatRequest.model_validate(body(messages=[{"role": "assistant", "content": None, "tool_calls": []}]))
    assert request.messages[0].content == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.5),
        ("temperature", "0.5"),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", 5),
        ("seed", "x"),
        ("stream", "yes"),
        ("session_id", ""),
        ("session_id", "a" * 257),
        ("session_id", "two words"),
        ("session_id", "caf\u00e9"),
        ("session_id", "line\nbreak"),
        ("parent_session_id", " "),
        ("cache_salt", ""),
        ("priority", 1.5),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": 101}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("top_logprobs", 21),
        ("reasoning_effort", "lots"),
    ],
)
def test_a_bad_value_is_refused_where_it_stands(name: str, value: object) -> None:
    loc, _, _ = first_error(body(**{name: value}))
    assert loc[0] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    _, context, _ = first_error(body(**fields))
    assert context["param"] == param


def test_other_servers_words_for_a_session_are_read() -> None:
    hint = {"session_id": "s", "parent_session_id": "p", "cache_control": {"ttl": "5m"}, "context_management": {}}
    asked = ChatRequest.model_validate(body(agent_hint=hint))
    assert (asked.named_session, asked.named_parent, asked.wishes.keep_seconds) == ("s", "p", 300.0)
    nvext = {"session_control": {"session_id": "d", "action": "open"}, "agent_hints": {"priority": 5, "osl": 9}}
    asked = ChatRequest.model_validate(body(nvext={**nvext, "cache_salt": "x", "cache_control": {"ttl": 60}}))
    assert (asked.named_session, asked.salt) == ("d", "x")
    assert (asked.wishes.priority, asked.wishes.keep_seconds) == (-5, 60.0)
    ours = ChatRequest.model_validate(body(nvext=nvext, agent_hint=hint, session_id="own", priority=1))
    assert (ours.named_session, ours.wishes.priority) == ("own", 1)


def test_stop_is_one_string_or_up_to_four() -> None:
    assert ChatRequest.model_validate(body(stop="END")).stop == ["END"]
    assert ChatRequest.model_validate(body(stop=["a", "b", "c", "d"])).stop == ["a", "b", "c", "d"]


def test_two_limits_that_differ_are_refused_and_equal_ones_are_one() -> None:
    assert ChatRequest.model_validate(body(max_tokens=5, max_completion_tokens=5)).output_limit == 5
    assert ChatRequest.model_validate(body(max_completion_tokens=7)).output_limit == 7
    _, context, _ = first_error(body(max_tokens=5, max_completion_tokens=6))
    assert context["param"] == "max_tokens"


def test_prewarm_asks_for_no_output() -> None:
    request = ChatRequest.model_validate(body(max_tokens=9, prompt_cache_options={"mode": "implicit", "prewarm": True}))
    assert request.output_limit == 0


def test_stream_options_without_a_stream_are_refused() -> None:
    _, context, _ = first_error(body(stream_options={"include_usage": True}))
    assert context["param"] == "stream_options"


def test_what_is_asked_for_a_session_is_taken_over() -> None:
    extras = {
        "expected_idle_seconds": 2.5,
        "keep_seconds": 1800,
        "expire_seconds": 3600,
        "persist": "memory",
        "final": True,
    }
    asked = ChatRequest.model_validate(body(session=extras, priority=-1)).wishes
    assert asked == Wishes(-1, 1800.0, 3600.0, Persist.MEMORY, 2.5, True)


@pytest.mark.parametrize("fields", [{}, {"session": {}}, {"session": None}, {"session": {"expire_seconds": None}}])
def test_a_request_that_is_silent_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert ChatRequest.model_validate(body(**fields)).wishes == SILENT


@pytest.mark.parametrize(
    ("ttl", "seconds"), [("30m", 1800.0), ("1h", 3600.0), ("90s", 90.0), ("2d", 172_800.0), ("soon", None), ("", None)]
)
def test_openais_ttl_is_a_wish_to_be_kept(ttl: str, seconds: float | None) -> None:
    assert ChatRequest.model_validate(body(prompt_cache_options={"ttl": ttl})).wishes.keep_seconds == seconds
    both = body(prompt_cache_options={"ttl": ttl}, session={"keep_seconds": 5})
    assert ChatRequest.model_validate(both).wishes.keep_seconds == 5.0


@pytest.mark.parametrize(
    "extras", [{"expire_seconds": -1}, {"keep_seconds": "60"}, {"persist": "tape"}, {"expire_seconds": float("inf")}]
)
def test_what_could_not_be_kept_is_refused_by_name(extras: dict[str, Any]) -> None:
    loc, _, _ = first_error(body(session=extras))
    assert loc == ("session", *extras)


def test_a_patch_changes_what_it_names_and_null_takes_it_back() -> None:
    assert SessionPatch.model_validate({}).change == Change()
    assert SessionPatch.model_validate({"priority": 2, "pinned": True}).change == Change(priority=2, pinned=True)
    assert SessionPatch.model_validate({"expire_seconds": 5}).change == Change(expire_seconds=5.0)
    everything = dict.fromkeys(("priority", "keep_seconds", "expire_seconds", "pinned"))
    assert SessionPatch.model_validate(everything).change == Change(0, 0.0, False, None, never_expires=True)


@pytest.mark.parametrize("messages", [[], "hi", None, {}])
def test_messages_are_a_list_of_at_least_one(messages: object) -> None:
    loc, _, _ = first_error(body(messages=messages))
    assert loc == ("messages",)
