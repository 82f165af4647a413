"""An answer in the form of a chat completion, whole or in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app import sse
from app.form import Form
from app.logprobs import chat_logprobs
from models.deltas import CallArguments, CallBegins, Content, Delta, Reasoning, Said

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.exchange import Exchange
    from app.sse import ChunkFormat, Head
    from app.turns import Piece
    from models.output import OutputParser
    from models.token_names import TokenNames


class Choice:
    """One answer as far as it has come; `one_call` lets its first call of a tool stand alone."""

    def __init__(self, parser: OutputParser, one_call: bool, is_named: bool) -> None:
        self.said = Said()
        self.notes: list[object] = []
        self.finish_reason = ""
        self.reasoning_tokens = 0
        self._parser = parser
        self._one_call = one_call
        self._is_named = is_named

    def add(self, piece: Piece) -> list[Delta]:
        """Take a piece; what it adds."""
        was_reasoning = self._parser.is_reasoning
        deltas = self._parser.feed(piece.text)
        if was_reasoning or self._parser.is_reasoning:
            self.reasoning_tokens += piece.tokens
        if piece.finish_reason is not None:
            deltas += self._parser.finish()
        if self._one_call:
            deltas = [delta for delta in deltas if getattr(delta, "index", 0) == 0]
        for delta in deltas:
            self.said.add(delta)
        self.notes += piece.notes
        if piece.finish_reason is not None:
            self.finish_reason = self._reason(piece.finish_reason)
        return deltas

    def _reason(self, finish_reason: str) -> str:
        # A call of the one tool that was named is what OpenAI calls a plain stop.
        is_call = finish_reason == "stop" and self.said.calls and not self._is_named
        return "tool_calls" if is_call else finish_reason


class ChatForm(Form):
    """See app.form. There is a parser for each choice; `names` tell tokens in logprobs, None where none are wanted."""

    def __init__(
        self,
        head: Head,
        chunks: ChunkFormat,
        names: TokenNames | None,
        parsers: Sequence[OutputParser],
        include_usage: bool,
        *,
        one_call: bool = False,
        is_named: bool = False,
    ) -> None:
        self._head = head
        self._chunks = chunks
        self._names = names
        self._choices = [Choice(parser, one_call, is_named) for parser in parsers]
        self._include_usage = include_usage
        self._is_open = False

    def chunk(self, piece: Piece, exchange: Exchange) -> bytes:
        """As Form's."""
        if piece.is_first:
            session = None if self._is_open else exchange.session_as_granted()
            self._is_open = True
            return self._chunks.opening(session, piece.choice)
        choice = self._choices[piece.choice]
        data = self._deltas(choice.add(piece), piece)
        if piece.finish_reason is not None:
            told = {"session": exchange.session(), "timings": exchange.timings()} if exchange.is_over else {}
            data += self._chunks.closing(choice.finish_reason, told, piece.choice)
        return data

    def _deltas(self, deltas: Sequence[Delta], piece: Piece) -> bytes:
        if self._names is None:
            return b"".join(self._delta(delta, piece.choice) for delta in deltas)
        if not deltas and not piece.notes:
            return b""
        # What is told of a piece's tokens goes with its first delta, or alone while their text is held back.
        told = [object_of(delta) for delta in deltas] or [{}]
        chunks = [self._chunks.delta(told[0], piece.choice, self._logprobs(piece.notes))]
        return b"".join([*chunks, *(self._chunks.delta(one, piece.choice) for one in told[1:])])

    def _delta(self, delta: Delta, choice: int) -> bytes:
        match delta:
            case Content(text):
                return self._chunks.text(text, choice)
            case Reasoning(text):
                return self._chunks.text(text, choice, "reasoning_content")
            case _:
                return self._chunks.delta(object_of(delta), choice)

    def ending(self, exchange: Exchange) -> bytes:
        """As Form's."""
        return (self._chunks.usage(self._usage(exchange)) if self._include_usage else b"") + sse.DONE

    def take(self, piece: Piece, exchange: Exchange) -> None:
        """As Form's."""
        self._choices[piece.choice].add(piece)

    def whole(self, exchange: Exchange) -> dict[str, object]:
        """As Form's."""
        return {
            **self._head.fields("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": self._usage(exchange),
            "session": exchange.session(),
            "timings": exchange.timings(),
        }

    def _usage(self, exchange: Exchange) -> dict[str, object]:
        return exchange.usage(sum(choice.reasoning_tokens for choice in self._choices))

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        return {
            "index": index,
            "message": message_object(choice.said),
            "logprobs": self._logprobs(choice.notes),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, notes: object) -> Mapping[str, object] | None:
        return None if self._names is None else chat_logprobs(notes, self._names)


def message_object(said: Said) -> dict[str, object]:
    """An answer as OpenAI's message; a content that is not there beside calls is null."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None, "annotations": []}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return message


def object_of(delta: Delta) -> dict[str, object]:
    """A delta as a chunk has it."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegins(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
