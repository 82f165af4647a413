"""An answer in the form of a chat completion, whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app import sse
from app.logprobs import chat_logprobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.exchange import Exchange
    from app.sse import ChunkFormat, Head
    from app.turns import Piece
    from models.token_names import TokenNames


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come."""

    content: str = ""
    notes: list[object] = field(default_factory=list)
    finish_reason: str = ""


class ChatForm:
    """See app.form. `names` tell tokens in logprobs; None where none were asked for."""

    def __init__(self, head: Head, chunks: ChunkFormat, names: TokenNames | None, choices: int, usage: bool) -> None:
        self._head = head
        self._chunks = chunks
        self._names = names
        self._choices = [Choice() for _ in range(choices)]
        self._include_usage = usage
        self._is_open = False

    def chunk(self, piece: Piece, exchange: Exchange) -> bytes:
        """As Form's."""
        if piece.is_first:
            session = None if self._is_open else exchange.session_as_granted()
            self._is_open = True
            return self._chunks.opening(session, piece.choice)
        if piece.finish_reason is not None:
            told = {"session": exchange.session(), "timings": exchange.timings()} if exchange.is_over else {}
            return self._chunks.closing(piece.finish_reason, told, piece.choice)
        if self._names is None:
            return self._chunks.text(piece.text, piece.choice)
        return self._chunks.delta({"content": piece.text}, piece.choice, self._logprobs(piece.notes))

    def ending(self, exchange: Exchange) -> bytes:
        """As Form's."""
        return (self._chunks.usage(exchange.usage()) if self._include_usage else b"") + sse.DONE

    def take(self, piece: Piece, exchange: Exchange) -> None:
        """As Form's."""
        choice = self._choices[piece.choice]
        choice.content += piece.text
        choice.notes += piece.notes
        choice.finish_reason = piece.finish_reason or choice.finish_reason

    def whole(self, exchange: Exchange) -> dict[str, object]:
        """As Form's."""
        return {
            **self._head.fields("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": exchange.usage(),
            "session": exchange.session(),
            "timings": exchange.timings(),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "assistant",
            "content": choice.content,
            "refusal": None,
            "annotations": [],
        }
        logprobs = self._logprobs(choice.notes)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _logprobs(self, notes: object) -> Mapping[str, object] | None:
        return None if self._names is None else chat_logprobs(notes, self._names)
