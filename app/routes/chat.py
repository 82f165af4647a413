"""`POST /v1/chat/completions`."""

import secrets
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.answers import StreamedAnswer, WholeAnswer
from app.chat_form import ChatForm
from app.chat_prompt import chat_prompt
from app.gateway import gateway_of
from app.prompts import prepare
from app.schema import ChatRequest
from app.sse import STREAM, ChunkFormat, Head
from app.structure import constrain

router = APIRouter(prefix="/v1")


@router.post("/chat/completions", responses=STREAM)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer the last message, whole or as a stream; the turns run when the response is called."""
    gateway = gateway_of(request.app)
    render = chat_prompt(gateway, body)
    exchange = await prepare(gateway, body, request.headers, [render], constrain=constrain(gateway, body))
    head = Head(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), body.model, gateway.system_fingerprint)
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    chunks = ChunkFormat(head, include_usage, obfuscate=bool(options and options.include_obfuscation))
    names = None if body.told_logprobs is None else gateway.chat.names
    parsers = [gateway.chat.parser(turn.rendered) for turn in exchange.turns]
    form = ChatForm(
        head,
        chunks,
        names,
        parsers,
        include_usage,
        one_call=body.parallel_tool_calls is False,
        is_named=body.names_a_tool,
    )
    if not body.stream:
        return WholeAnswer(exchange, form)
    return StreamedAnswer(exchange, form, gateway.settings.sse_keepalive_seconds)
