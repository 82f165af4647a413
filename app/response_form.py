"""An answer in the form of OpenAI's Responses: one object, or its typed events.

    created, in_progress                what the grant knows of `session` is in the response of both
    output_item.added ... .done         response_output.py
    completed | incomplete | failed     the whole response

Events are named, as there, and numbered. No [DONE] follows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app import sse
from app.form import Form
from app.logprobs import chat_logprobs
from app.response_output import Output
from models.deltas import Content

if TYPE_CHECKING:
    from app.chat_form import Choice
    from app.errors import ErrorReply
    from app.exchange import Exchange
    from app.replies import Before
    from app.response_output import Event, Logprobs
    from app.response_request import ResponsesRequest
    from app.turns import Piece
    from models.token_names import TokenNames

Diagnosis = Callable[[int], dict[str, object]]
"""`prompt_cache_diagnostics`, from how many tokens were reused."""

OBFUSCATED = ("response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta")


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every response object of one answer repeats."""

    id: str
    created: int
    request: ResponsesRequest
    before: Before

    def fields(self) -> dict[str, object]:
        """The request's part of it, in the forms that OpenAI's own types have."""
        request = self.request
        chosen = request.tool_choice
        reasoning = request.reasoning
        conversation = request.conversation
        effort = None if reasoning is None else reasoning.effort
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "background": False,
            "conversation": None if conversation is None else {"id": conversation.id},
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": request.model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "service_tier": "default",
            "store": request.is_kept,
            "temperature": request.temperature,
            "text": {"format": self._format(), "verbosity": "medium"},
            "tool_choice": "auto" if chosen is None else chosen.as_object(),
            "tools": [tool.as_object() for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
        }

    def _format(self) -> Mapping[str, object]:
        written = None if self.request.text is None else self.request.text.format
        if written is None or written.type != "json_schema":
            return {"type": "text" if written is None else written.type}
        return written.model_dump(by_alias=True)


class ResponseForm(Form):
    """See app.form. `names` tell tokens in logprobs, None where none are wanted; `diagnosis` is asked at the end."""

    def __init__(
        self,
        head: ResponseHead,
        choice: Choice,
        names: TokenNames | None,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        options = head.request.stream_options
        self._head = head
        self._fields = head.fields()
        self._choice = choice
        self._names = names
        self._diagnosis = diagnosis
        self._output = Output(head.id, seals_thoughts=head.request.seals_thoughts)
        self._obfuscates = bool(options and options.include_obfuscation)
        self._held: Logprobs = []
        self._number = 0

    def chunk(self, piece: Piece, exchange: Exchange) -> bytes:
        """As Form's."""
        if piece.is_first:
            opened = self._response("in_progress", session=exchange.session_as_granted())
            kinds = ("response.created", "response.in_progress")
            return self._written({"type": kind, "response": opened} for kind in kinds)
        return self._written(self._events(piece))

    def ending(self, exchange: Exchange) -> bytes:
        """As Form's."""
        response = self.whole(exchange)
        return self._written([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, reply: ErrorReply) -> bytes:
        """As Form's."""
        error = {"code": _code(reply.status), "message": reply.message, "param": reply.param, "type": reply.type}
        return self._written([{"type": "response.failed", "response": self._response("failed", error=error)}])

    def take(self, piece: Piece, exchange: Exchange) -> None:
        """As Form's."""
        for _ in self._events(piece):
            pass

    def whole(self, exchange: Exchange) -> dict[str, object]:
        """As Form's."""
        reused = exchange.turns[0].figures.reused_tokens
        told = {} if self._diagnosis is None else {"prompt_cache_diagnostics": self._diagnosis(reused)}
        return self._response(
            self._status,
            usage=_usage(exchange.usage(self._choice.reasoning_tokens)),
            completed_at=int(time.time()) if self._status == "completed" else None,
            incomplete_details={"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            session=exchange.session(),
            timings=exchange.timings(),
            **told,
        )

    # --- what has come so far ---------------------------------------------------------------

    @property
    def _status(self) -> str:
        cut = self._choice.finish_reason == "length" and not self._head.request.is_prewarm
        return "incomplete" if cut else "completed"

    def _events(self, piece: Piece) -> Iterable[Event]:
        deltas = self._choice.add(piece)
        if self._names is not None:
            self._held += _logprobs(piece, self._names)
        for delta in deltas:
            if isinstance(delta, Content):
                told, self._held = self._held, []
                yield from self._output.take(delta, told)
            else:
                self._held = []  # they are told of the text only
                yield from self._output.take(delta, [])
        if piece.finish_reason is not None:
            yield from self._output.finish(self._status, self._held, may_be_empty=self._head.request.is_prewarm)

    def _response(self, status: str, **fields: object) -> dict[str, object]:
        nothing: dict[str, object] = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        output = [dict(item) for item in self._output.items]
        return {**self._fields, **nothing, "status": status, "output": output, **fields}

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        kind = event["type"]
        told: dict[str, Any] = {"type": kind, "sequence_number": self._number, **event}
        self._number += 1
        if self._obfuscates and kind in OBFUSCATED:
            told["obfuscation"] = sse.padding(len(event["delta"]))
        return f"event: {kind}\ndata: {json.dumps(told, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _usage(usage: Mapping[str, Any]) -> dict[str, object]:
    """A chat's usage in this dialect's words."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _logprobs(piece: Piece, names: TokenNames) -> Logprobs:
    content = chat_logprobs(piece.notes, names)["content"]
    assert isinstance(content, list)
    return content


def _code(status: int) -> str:
    """OpenAI's few codes of a response that failed."""
    if status == 429:
        return "rate_limit_exceeded"
    return "server_error" if status >= 500 else "invalid_prompt"
