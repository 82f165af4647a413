"""Where a session id may come from, and in which order."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import Headers

from app.schema import ChatRequest
from app.sessions import SessionName, new_session_id, session_name

UUID = "0b6a2a4e-52a1-4d0c-9d3c-2f6d2f7e1c11"


def name(headers: dict[str, str] | None = None, extra: tuple[str, ...] = (), **fields: object) -> SessionName:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return session_name(ChatRequest.model_validate(body), Headers(headers or {}), extra)


def test_the_body_wins_over_every_header() -> None:
    found = name({"X-Session-ID": "header"}, session_id="run-42/planner", parent_session_id="run-42")
    assert found == SessionName("run-42/planner", "body", "run-42")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X-Session-ID": "a", "X-Parent-Session-ID": "p"}, SessionName("a", "header:x-session-id", "p")),
        (
            {"X-Dynamo-Session-ID": "a", "X-Dynamo-Parent-Session-ID": "p"},
            SessionName("a", "header:x-dynamo-session-id", "p"),
        ),
        (
            {"X-Claude-Code-Agent-Id": "a", "X-Claude-Code-Parent-Agent-Id": "p", "X-Claude-Code-Session-Id": "s"},
            SessionName("a", "header:x-claude-code-agent-id", "p"),
        ),
        (
            {"X-Claude-Code-Agent-Id": "a", "X-Claude-Code-Session-Id": "s"},
            SessionName("a", "header:x-claude-code-agent-id", "s"),
        ),
        ({"X-Claude-Code-Session-Id": "s"}, SessionName("s", "header:x-claude-code-session-id")),
        ({"thread-id": "t", "x-codex-parent-thread-id": "p"}, SessionName("t", "header:thread-id", "p")),
        ({"session-id": "s"}, SessionName("s", "header:session-id")),
        ({"x-session-affinity": "s"}, SessionName("s", "header:x-session-affinity")),
        ({"X-OpenWebUI-Chat-Id": "s"}, SessionName("s", "header:x-openwebui-chat-id")),
        ({"X-Conversation-Id": "s"}, SessionName("s", "header:x-conversation-id")),
        ({"x-litellm-session-id": "s"}, SessionName("s", "header:x-litellm-session-id")),
    ],
)
def test_each_client_is_understood(headers: dict[str, str], expected: SessionName) -> None:
    assert name(headers) == expected


def test_the_order_of_carriers_is_kept() -> None:
    ordered = [
        "x-session-id",
        "x-dynamo-session-id",
        "x-claude-code-agent-id",
        "x-claude-code-session-id",
        "thread-id",
        "session-id",
        "x-session-affinity",
        "x-openwebui-chat-id",
        "x-conversation-id",
        "x-litellm-session-id",
        "x-user-id",
    ]
    while ordered:
        assert name(dict.fromkeys(ordered, "v"), extra=("X-User-Id",)).source == f"header:{ordered.pop(0)}"


@pytest.mark.parametrize("value", ["", "a" * 257, "two words", "caf\u00e9", "tab\there"])
def test_a_header_that_is_no_id_is_skipped(value: str) -> None:
    assert name({"X-Session-ID": value, "x-conversation-id": "good"}).source == "header:x-conversation-id"
    assert name({"X-Session-ID": "a", "X-Parent-Session-ID": value}).parent_id is None


def test_a_header_of_256_characters_is_taken() -> None:
    assert name({"X-Session-ID": "a" * 256}).id == "a" * 256


@pytest.mark.parametrize(
    "user_id",
    [
        f"user_abc_account_def_session_{UUID}",
        json.dumps({"device_id": "d", "session_id": UUID}),
    ],
)
def test_claude_codes_session_is_read_from_its_user_id(user_id: str) -> None:
    assert name(metadata={"user_id": user_id}) == SessionName(UUID, "metadata.user_id")


@pytest.mark.parametrize(
    "user_id", ["alice", "{broken", "{}", '{"session_id": 5}', '{"session_id": "a b"}', 5, "[" * 9]
)
def test_a_person_is_no_session(user_id: object) -> None:
    assert name(metadata={"user_id": user_id}).id is None


def test_an_unconfigured_header_names_nothing() -> None:
    assert name({"x-user-id": "alice"}) == SessionName(None, "new")
    assert name({"x-user-id": "alice"}, extra=("x-user-id",)) == SessionName("alice", "header:x-user-id")


def test_a_group_key_or_a_user_is_no_session() -> None:
    assert name(prompt_cache_key="group", user="alice").id is None


def test_a_parent_in_the_body_counts_whoever_names_the_session() -> None:
    assert name({"X-Session-ID": "a"}, parent_session_id="p").parent_id == "p"
    assert name(parent_session_id="p") == SessionName(None, "new", "p")


def test_new_ids_are_valid_and_never_repeat() -> None:
    first, second = new_session_id(), new_session_id()
    assert first != second
    assert name({"X-Session-ID": first}).id == first
