"""`POST /v1/chat/completions`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.answers import StreamedAnswer, WholeAnswer
from app.gateway import gateway_of
from app.prompts import prepare
from app.schema import ChatRequest
from app.sse import ChunkFormat

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer the last message, whole or as a stream; the turn runs when the response is called."""
    gateway = gateway_of(request.app)
    turn = await prepare(gateway, body, request.headers)
    if not body.stream:
        return WholeAnswer(turn)
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    form = ChunkFormat(turn.head, include_usage, obfuscate=bool(options and options.include_obfuscation))
    return StreamedAnswer(turn, form, include_usage, gateway.settings.sse_keepalive_seconds)
