"""The tables of fields in docs/api.md say what the code does, and leave out no field that OpenAI has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from anthropic.types.beta import message_create_params as beta_params
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

from app import anthropic_fields
from app.anthropic_request import CountRequest, MessagesRequest
from app.completion_request import CompletionRequest
from app.fields import CHAT_NOT_BUILT, COMPLETION_NOT_BUILT, verdicts
from app.schema import ChatRequest
from models.json_schema import ANNOTATIONS, FORMATS, SUPPORTED

API = Path(__file__).parents[2] / "docs" / "api.md"


def table(heading: str) -> dict[str, str]:
    """Field -> verdict, from the table under a heading."""
    section = API.read_text().split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| `([^|]+)` \| ([^|]+) \|", section, re.MULTILINE)
    assert rows
    return {name: verdict.strip() for names, verdict in rows for name in names.split("`, `")}


def test_every_field_of_a_chat_completion_is_in_the_table_as_it_is_in_the_code() -> None:
    assert table("Fields of a chat completion") == verdicts(ChatRequest.model_fields, CHAT_NOT_BUILT)


@pytest.mark.parametrize(
    "params", [chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming]
)
def test_no_field_of_openais_own_is_left_out(params: type) -> None:
    fields = params.__required_keys__ | params.__optional_keys__  # type: ignore[attr-defined]
    assert len(fields) > 30
    assert fields - set(table("Fields of a chat completion")) == set()


def test_every_field_of_a_completion_is_in_its_table_as_it_is_in_the_code() -> None:
    told = table("Fields of a completion")
    assert told == verdicts(CompletionRequest.model_fields, COMPLETION_NOT_BUILT)
    assert CompletionCreateParamsNonStreaming.__optional_keys__ - set(told) == set()


def test_every_field_of_a_message_is_in_its_table_as_it_is_in_the_code() -> None:
    told = table("Fields of a message")
    declared = MessagesRequest.model_fields
    assert told == verdicts(declared, anthropic_fields.NOT_BUILT, anthropic_fields.NO_EFFECT)
    assert CountRequest.model_fields.keys() < declared.keys()


@pytest.mark.parametrize(
    "params",
    [
        MessageCreateParamsNonStreaming,
        MessageCreateParamsStreaming,
        MessageCountTokensParams,
        beta_params.MessageCreateParamsNonStreaming,
    ],
)
def test_no_field_of_anthropics_own_is_left_out(params: type) -> None:
    fields = params.__required_keys__ | params.__optional_keys__  # type: ignore[attr-defined]
    assert len(fields) > 10
    assert fields - set(table("Fields of a message")) == {"betas"} & fields  # that one is sent as a header


@pytest.mark.parametrize(
    ("label", "listed"),
    [("Keywords of JSON Schema", SUPPORTED), ("Accepted, and nothing asked", ANNOTATIONS), ("Formats", FORMATS)],
)
def test_the_lists_of_what_schemas_may_hold_are_the_codes_own(label: str, listed: tuple[str, ...]) -> None:
    paragraph = API.read_text().split(f"{label}: ", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"`([^`]+)`", paragraph) == list(listed)
