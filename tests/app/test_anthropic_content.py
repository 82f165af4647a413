"""Blocks of an answer and the events that tell of them say the same, however the answer came in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from app.anthropic_content import AnswerContent, CleanJson, signature, tool_input
from models.deltas import CallArguments, CallBegins, Content, Delta, Reasoning


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Deltas of thoughts, texts and calls, their texts in pieces of any size."""
    deltas: list[Delta] = []
    for index, kind in enumerate(draw(st.lists(st.sampled_from(["thought", "text", "call"]), max_size=5))):
        if kind == "call":
            value = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.integers(), max_size=3))
            spelled = json.dumps(value, ensure_ascii=False).replace("\\n", "\n").replace("\\t", "\t")
            cuts = sorted(draw(st.lists(st.integers(0, len(spelled)), max_size=4)))
            parts = [spelled[start:end] for start, end in zip([0, *cuts], [*cuts, len(spelled)], strict=True)]
            deltas += [CallBegins(index, f"call_{index}", "f"), *(CallArguments(index, part) for part in parts)]
        else:
            texts = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3))
            deltas += [Reasoning(text) if kind == "thought" else Content(text) for text in texts]
    return deltas


@given(answers())
def test_the_events_make_the_blocks(deltas: list[Delta]) -> None:
    content, told = AnswerContent(), []
    for delta in deltas:
        told += content.add(delta)
    told += content.close()
    made: list[dict[str, Any]] = []
    arguments = ""
    for event in told:
        if event["type"] == "content_block_start":
            made.append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name == "partial_json":
                    arguments += value
                    made[-1]["input"] = from_json(arguments, allow_partial=True) if arguments else {}
                elif name != "type":
                    made[-1][name] += value
        assert event["index"] == len(made) - 1
    assert made == content.blocks
    assert [event["type"] for event in told].count("content_block_stop") == len(made)
    assert content.close() == []


@given(st.text(max_size=40))
def test_any_text_within_a_string_becomes_json(text: str) -> None:
    spelled = '{"a": "' + text.replace("\\", "\\\\").replace('"', '\\"') + '"}'
    clean = CleanJson()
    told = "".join(clean.feed(character) for character in spelled)
    assert told == clean.text
    assert json.loads(told) == {"a": text}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1, "b": "cut of', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("[1]", {}),
        ("{a: 1}", {}),
        ('{"a": NaN}', {}),
        ('{"a": "\\ud800"}', {}),
        ("[" * 5000, {}),
    ],
)
def test_an_input_is_an_object_that_can_be_sent(arguments: str, expected: dict[str, Any]) -> None:
    value = tool_input(arguments)
    assert value == expected
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def test_a_signature_goes_with_its_thought() -> None:
    assert signature("a") == signature("a") != signature("b")
