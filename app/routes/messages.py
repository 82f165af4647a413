"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API over the same turns."""

import secrets
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from app.answers import StreamedAnswer, WholeAnswer
from app.anthropic_chat import AnthropicChat, chat_request
from app.anthropic_errors import URL, AnthropicError
from app.anthropic_form import AnthropicForm, Heading
from app.anthropic_request import CountRequest, MessagesRequest
from app.chat_prompt import chat_prompt
from app.folding import render_folded
from app.gateway import Gateway, gateway_of
from app.prompts import Render, prepare
from app.sse import STREAM
from app.structure import constrain

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError, "description": "Refused, or failed"} for status in ("4XX", "5XX")
}

router = APIRouter(prefix=URL, responses=ERRORS)


@router.post("", responses=STREAM)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer the last message, whole or as a stream; the turn runs when the response is called."""
    gateway = gateway_of(request.app)
    chat = _chat(gateway, body)
    render, grammar = _render(gateway, chat), constrain(gateway, chat)
    exchange = await prepare(gateway, chat, request.headers, [render], constrain=grammar)
    heading = Heading(
        id=f"msg_{secrets.token_hex(12)}",
        model=body.model,
        request_id=request.scope["state"]["request_id"],
        max_tokens=body.max_tokens,
        wants_diagnostics=body.diagnostics is not None,
    )
    parser = gateway.chat.parser(exchange.turns[0].rendered)
    form = AnthropicForm(heading, parser, one_call=chat.parallel_tool_calls is False)
    if not body.stream:
        return WholeAnswer(exchange, form)
    return StreamedAnswer(exchange, form, gateway.settings.sse_keepalive_seconds)


class TokenCount(BaseModel):
    """How long a prompt would be."""

    input_tokens: int


@router.post("/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> TokenCount:
    """Count the tokens of a prompt, as a first turn would run it."""
    gateway = gateway_of(request.app)
    gateway.names.check(body.model)
    render = _render(gateway, _chat(gateway, body))
    encoded = await gateway.in_thread(lambda: gateway.chat.encode(render()))
    return TokenCount(input_tokens=len(encoded.token_ids))


def _chat(gateway: Gateway, body: CountRequest) -> AnthropicChat:
    return chat_request(body, has_switch=gateway.chat.thinking.name is not None)


def _render(gateway: Gateway, chat: AnthropicChat) -> Render:
    return lambda: render_folded(
        chat.messages,
        lambda shape: chat_prompt(gateway, chat.model_copy(update={"messages": shape}))(),
    )
