"""Conversations that a template refuses, told in a shape that it takes.

Agents that speak Anthropic's dialect put the system's words between the others', and texts behind results of tools.
Many templates raise at either, because they want user and assistant in turns, or at any system's word at all. Such a
message is then moved into its neighbour:

    the system's, not at the start    a user's, within <system-reminder>, as Claude Code itself marks them
    a user's behind a tool's          the end of the tool's
    a user's behind a user's          the end of that
    the system's, at the start        the beginning of the first user's; only where the others were not enough

Only a template that refuses gets this. What is moved lies where the conversation grows, so reuse is not hurt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.messages import Message
from models.errors import TemplateFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from models.rendering import Rendered


def render_folded(messages: Sequence[Message], render: Callable[[list[Message]], Rendered]) -> Rendered:
    """What `render` makes of the messages, or of the first folding of them that it takes.

    Raises:
        TemplateFailed: of no folding; with the words about the messages as they came.
    """
    try:
        return render(list(messages))
    except TemplateFailed as refusal:
        for with_first in (False, True):
            shape = folded(messages, with_first=with_first)
            try:
                return render(shape)
            except TemplateFailed:
                continue
        raise refusal


def folded(messages: Sequence[Message], *, with_first: bool = False) -> list[Message]:
    """The messages with those moved that stand where a template may not want them."""
    shape: list[Message] = []
    for message in messages:
        told = message
        if message.role == "system" and (shape or with_first):
            told = Message(role="user", content=_reminder(message.content) if shape else message.content)
        last = shape[-1] if shape else None
        if told.role == "user" and last is not None and last.role in ("user", "tool"):
            shape[-1] = last.model_copy(update={"content": f"{last.content}\n\n{told.content}"})
        else:
            shape.append(told)
    return shape


def _reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"
