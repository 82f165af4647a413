"""An answer in the form of an Anthropic message, whole or as named events.

    message_start  ping  content blocks (anthropic_content.py)...  message_delta  message_stop

Prompts are counted apart there: `input_tokens` are those neither read from the cache nor written to it, and the three
numbers together are the prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app import anthropic_errors
from app.anthropic_content import AnswerContent
from app.chat_form import Choice
from app.form import Form

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.errors import ErrorReply
    from app.exchange import Exchange
    from app.turns import Piece
    from models.output import OutputParser


def event(value: Mapping[str, object]) -> bytes:
    """A server-sent event that is named as its type."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"event: {value['type']}\ndata: {data}\n\n".encode()


PING = event({"type": "ping"})


@dataclass(frozen=True, slots=True)
class Heading:
    """What is known of a message before it is written. `request_id` goes with errors, `max_tokens` is the client's."""

    id: str
    model: str
    request_id: str | None
    max_tokens: int
    wants_diagnostics: bool = False


class AnthropicForm(Form):
    """See app.form; one choice, read by `parser`."""

    keep_alive = PING

    def __init__(self, heading: Heading, parser: OutputParser, *, one_call: bool = False) -> None:
        self._heading = heading
        self._choice = Choice(parser, one_call, is_named=False)
        self._content = AnswerContent()
        self._stop_string: str | None = None

    def failure(self, reply: ErrorReply) -> bytes:
        """As Form's."""
        return b"event: error\ndata: " + anthropic_errors.payload(reply, self._heading.request_id) + b"\n\n"

    def chunk(self, piece: Piece, exchange: Exchange) -> bytes:
        """As Form's."""
        if piece.is_first:
            return event({"type": "message_start", "message": self._opening(exchange)}) + PING
        return b"".join(map(event, self._add(piece)))

    def ending(self, exchange: Exchange) -> bytes:
        """As Form's."""
        closing = {
            "type": "message_delta",
            "delta": self._stop(exchange),
            "usage": self._usage(exchange),
            "session": exchange.session(),
            "timings": exchange.timings(),
        }
        return event(closing) + event({"type": "message_stop"})

    def take(self, piece: Piece, exchange: Exchange) -> None:
        """As Form's."""
        self._add(piece)

    def whole(self, exchange: Exchange) -> dict[str, object]:
        """As Form's."""
        return {
            **self._message(exchange),
            **self._stop(exchange),
            "content": self._content.blocks,
            "usage": {**self._usage(exchange), "service_tier": "standard"},
            "session": exchange.session(),
            "timings": exchange.timings(),
        }

    def _add(self, piece: Piece) -> list[dict[str, Any]]:
        events = [told for delta in self._choice.add(piece) for told in self._content.add(delta)]
        if piece.finish_reason is not None:
            self._stop_string = piece.stop_string
            events += self._content.close()
        return events

    def _opening(self, exchange: Exchange) -> dict[str, object]:
        """A message of which nothing is written yet."""
        return {
            **self._message(exchange),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(exchange), "service_tier": "standard"},
            "session": exchange.session_as_granted(),
        }

    def _message(self, exchange: Exchange) -> dict[str, object]:
        told = {
            "id": self._heading.id,
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "container": None,
        }
        return {**told, "diagnostics": diagnostics(exchange.session()) if self._heading.wants_diagnostics else None}

    def _stop(self, exchange: Exchange) -> dict[str, object]:
        reason = {"stop": "end_turn", "tool_calls": "tool_use"}.get(self._choice.finish_reason, "max_tokens")
        if self._stop_string is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and exchange.turns[0].spec.max_new_tokens < self._heading.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": self._stop_string, "stop_details": None}

    def _usage(self, exchange: Exchange) -> dict[str, object]:
        usage: Mapping[str, Any] = exchange.usage(self._choice.reasoning_tokens)
        details = usage["prompt_tokens_details"]
        computed = usage["prompt_tokens"] - details["cached_tokens"]
        # Blocks of the answer are written, too; what of them is the prompt's comes first.
        written = min(details["cache_write_tokens"], computed)
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": details["cached_tokens"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._choice.reasoning_tokens},
        }


_MISSES = {
    "new_session": "previous_message_not_found",
    "new_branch": "previous_message_not_found",
    "prompt_diverged": "messages_changed",
    "model_changed": "model_changed",
}


def diagnostics(session: Mapping[str, Any]) -> dict[str, object]:
    """Anthropic's words for a `miss_reason`; where a prompt left its branch within the system's, tools may be why."""
    reason = session["miss_reason"]
    if reason is None:
        return {"cache_miss_reason": None}
    kind = _MISSES.get(reason, "unavailable")
    if kind == "messages_changed" and session["diverged"]["message_index"] == 0:
        kind = "system_changed"
    missed = {"cache_missed_input_tokens": session["recomputed_tokens"]} if kind.endswith("_changed") else {}
    return {"cache_miss_reason": {"type": kind, **missed}}
