"""An answer in the form of a text completion, whole or in chunks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app import sse
from app.form import Form
from app.logprobs import finite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.exchange import Exchange
    from app.sse import Head
    from app.turns import Piece
    from models.token_names import TokenNames


@dataclass(slots=True)
class Told:
    """Legacy logprobs: parallel lists, and where each token begins in the choice's text."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def as_object(self) -> dict[str, object]:
        """As OpenAI writes it."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def extend(self, more: Told) -> None:
        """Take what comes next."""
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come; `offset` is where its next token begins."""

    text: str = ""
    told: Told = field(default_factory=Told)
    offset: int = 0
    finish_reason: str = ""


class CompletionForm(Form):
    """See app.form. `echoes` are the prompts' texts by choice, where they are to be repeated.

    `names` tell tokens in logprobs; None where none were asked for.
    """

    def __init__(
        self, head: Head, names: TokenNames | None, choices: int, usage: bool, echoes: Sequence[str] | None = None
    ) -> None:
        self._fields = head.fields("text_completion")
        self._names = names
        self._echoes = echoes
        self._choices = [Choice() for _ in range(choices)]
        self._include_usage = usage
        self._is_open = False

    def chunk(self, piece: Piece, exchange: Exchange) -> bytes:
        """As Form's."""
        text, told = self._add(piece, exchange)
        extras: dict[str, object] = {}
        if piece.is_first and not self._is_open:
            extras = {"session": exchange.session_as_granted()}
            self._is_open = True
        elif piece.finish_reason is not None and exchange.is_over:
            extras = {"session": exchange.session(), "timings": exchange.timings()}
        elif piece.is_first and not text:
            return b""
        choice = {
            "index": piece.choice,
            "text": text,
            "logprobs": None if told is None else told.as_object(),
            "finish_reason": piece.finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return _event({**self._fields, **usage, "choices": [choice], **extras})

    def ending(self, exchange: Exchange) -> bytes:
        """As Form's."""
        usage = {**self._fields, "choices": [], "usage": exchange.usage()}
        return (_event(usage) if self._include_usage else b"") + sse.DONE

    def take(self, piece: Piece, exchange: Exchange) -> None:
        """As Form's."""
        choice = self._choices[piece.choice]
        text, told = self._add(piece, exchange)
        choice.text += text
        if told is not None:
            choice.told.extend(told)
        choice.finish_reason = piece.finish_reason or choice.finish_reason

    def whole(self, exchange: Exchange) -> dict[str, object]:
        """As Form's."""
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": None if self._names is None else choice.told.as_object(),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        told = {"usage": exchange.usage(), "session": exchange.session(), "timings": exchange.timings()}
        return {**self._fields, "choices": choices, **told}

    def _add(self, piece: Piece, exchange: Exchange) -> tuple[str, Told | None]:
        """Text and logprobs of one piece, an echo included."""
        text = piece.text
        if piece.is_first and self._echoes is not None:
            text = self._echoes[piece.choice] + text
        if self._names is None:
            return text, None
        notes: list[Any] = [*piece.prompt_notes, *piece.notes]
        told = Told()
        choice = self._choices[piece.choice]
        if piece.is_first and self._echoes is not None:
            first = exchange.turns[piece.choice].spec.token_ids[0]
            self._tell(told, choice, first, None, None)  # nothing comes before it that would make it likely
        for note in notes:
            top = {self._names.text(token_id): finite(logprob) for token_id, logprob in note.top}
            self._tell(told, choice, note.token_id, finite(note.logprob), top)
        return text, told

    def _tell(
        self, told: Told, choice: Choice, token_id: int, logprob: float | None, top: Mapping[str, float] | None
    ) -> None:
        assert self._names is not None
        token = self._names.text(token_id)
        told.tokens.append(token)
        told.token_logprobs.append(logprob)
        told.top_logprobs.append(None if top is None or logprob is None else {**top, token: logprob})
        told.text_offset.append(choice.offset)
        choice.offset += len(token)


def _event(value: Mapping[str, object]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
