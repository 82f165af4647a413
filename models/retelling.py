"""History as the model ran it, where a client tells it in another spelling.

A call of a tool goes out as JSON and comes back as JSON, but rarely letter by letter: keys are sorted, spaces added.
The template then writes other text than the model did, and nothing behind it could be reused. So where the messages
that a branch ended with come again, the same by meaning, the template's own words for them

    [ prompt, as the template wrote it ][ the answer in the client's spelling ][ what ends it ][ what is new ]

are replaced by the branch's text, and only what ends the answer and what is new is taken from the template:

    [ the branch's text: its prompt and the answer in the model's spelling    ][ what ends it ][ what is new ]

Only a spelling may differ. The template's prompt must be what it was, and its answer, read like the model's, must say
the same, thoughts included: a template that drops them means the model to see them no more, and is obeyed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.errors import TemplateFailed
from models.meaning import digest_of, means_the_same
from models.output import OutputParser, parsed

if TYPE_CHECKING:
    from kvstore.history import History, Seam, Told
    from models.control_tokens import ControlTokens
    from models.rendering import Message, Rendered


@dataclass(frozen=True, slots=True)
class Retold:
    """A prompt's text, and where its messages' contents end in it."""

    text: str
    message_ends: tuple[int, ...]


def text_digest(text: str) -> bytes:
    """16 bytes that stand for a template's text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def retell(
    rendered: Rendered,
    histories: Sequence[History],
    control: ControlTokens,
    render: Callable[[Sequence[Message]], str],
    parser: Callable[[str], OutputParser],
) -> Retold:
    """`rendered` in the words of the history that tells most of it; as it is where there is none.

    `render` writes messages without a generation prompt; `parser` reads the answer to a prompt.
    """
    known = [history for history in histories if history.told is not None]
    known.sort(key=lambda history: len(history.text), reverse=True)
    for history in known:
        assert history.told is not None
        if history.told.num_messages > len(rendered.messages):
            continue
        if digest_of(rendered.messages[: history.told.num_messages]) != history.told.digest:
            continue
        retold = _retold(rendered, history, history.told, control, render, parser)
        if retold is not None:
            return retold
    return Retold(rendered.text, rendered.message_ends)


def _retold(
    rendered: Rendered,
    history: History,
    told: Told,
    control: ControlTokens,
    render: Callable[[Sequence[Message]], str],
    parser: Callable[[str], OutputParser],
) -> Retold | None:
    try:
        template = render(rendered.messages[: told.num_messages])
    except TemplateFailed:
        return None
    if not rendered.text.startswith(template):
        return None
    prompt = template[: told.prompt_length]
    if text_digest(prompt) != told.prompt_digest:
        return None
    answer = template[told.prompt_length :]
    end = control.last(answer)
    if end is None:
        return None
    own = history.text[told.answer_start :]
    theirs = answer[:end]
    if not means_the_same(*(parsed(parser(prompt), control.unmark(text)) for text in (own, theirs))):
        return None
    text = history.text + answer[end:] + rendered.text[len(template) :]
    return Retold(text, _ends(rendered, history, told, len(template), len(text) - len(rendered.text)))


def _ends(rendered: Rendered, history: History, told: Told, template_length: int, shift: int) -> tuple[int, ...]:
    """The branch's own for its messages, the template's, moved, for what is new."""
    old: tuple[Seam, ...] = history.message_ends
    if len(old) != told.num_messages or len(rendered.message_ends) != len(rendered.messages):
        return ()
    new = rendered.message_ends[told.num_messages :]
    assert all(end >= template_length for end in new)
    return (*(end.text_length for end in old), *(end + shift for end in new))
