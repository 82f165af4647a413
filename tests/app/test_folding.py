"""Conversations that a template refuses are told in another shape, and no others are."""

from __future__ import annotations

import pytest

from app.folding import folded, render_folded
from app.messages import Message
from models.errors import TemplateFailed
from models.rendering import Rendered

RENDERED = Rendered("", (), {}, (), 0)


def said(*messages: tuple[str, str]) -> list[Message]:
    return [Message.model_validate({"role": role, "content": content}) for role, content in messages]


def told(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_later_words_of_the_system_and_texts_behind_results_move_into_their_neighbours() -> None:
    messages = said(
        ("system", "s"),
        ("user", "a"),
        ("system", "b"),
        ("assistant", "c"),
        ("tool", "d"),
        ("user", "e"),
        ("system", "f"),
    )
    assert told(folded(messages)) == [
        ("system", "s"),
        ("user", "a\n\n<system-reminder>\nb\n</system-reminder>"),
        ("assistant", "c"),
        ("tool", "d\n\ne\n\n<system-reminder>\nf\n</system-reminder>"),
    ]
    assert told(folded(messages, with_first=True))[0] == ("user", "s\n\na\n\n<system-reminder>\nb\n</system-reminder>")
    assert told(folded(messages[:2])) == told(messages[:2])


def test_a_longer_conversation_is_folded_like_its_beginning() -> None:
    messages = said(("user", "a"), ("assistant", "c"), ("tool", "d"), ("user", "e"), ("assistant", "f"), ("user", "g"))
    assert told(folded(messages))[:3] == told(folded(messages[:5]))[:3]


def test_what_a_template_takes_is_left_as_it_is() -> None:
    shapes: list[list[Message]] = []

    def takes_all(messages: list[Message]) -> Rendered:
        shapes.append(messages)
        return RENDERED

    messages = said(("user", "a"), ("system", "b"))
    assert render_folded(messages, takes_all) is RENDERED
    assert shapes == [messages]


def test_the_first_shape_that_is_taken_counts_and_of_none_the_first_refusal() -> None:
    def takes_no_system(messages: list[Message]) -> Rendered:
        if any(message.role == "system" for message in messages):
            raise TemplateFailed(f"no system among {len(messages)}")
        return RENDERED

    assert render_folded(said(("system", "s"), ("user", "a"), ("system", "b")), takes_no_system) is RENDERED

    def takes_nothing(messages: list[Message]) -> Rendered:
        raise TemplateFailed(f"no {len(messages)}")

    with pytest.raises(TemplateFailed, match="no 3"):
        render_folded(said(("system", "s"), ("user", "a"), ("system", "b")), takes_nothing)
