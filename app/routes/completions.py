"""`POST /v1/completions`: text on, from a text or from token ids, without a template."""

import functools
import secrets
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.answers import StreamedAnswer, WholeAnswer
from app.completion_form import CompletionForm
from app.completion_request import CompletionRequest, Prompt
from app.errors import InvalidRequest
from app.gateway import Gateway, gateway_of
from app.prompts import Render, prepare
from app.sse import STREAM, Head

router = APIRouter(prefix="/v1")


@router.post("/completions", responses=STREAM)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt, whole or as a stream; the turns run when the response is called."""
    gateway = gateway_of(request.app)
    renders = [_render(gateway, body, prompt) for prompt in body.prompt]
    exchange = await prepare(gateway, body, request.headers, renders, prompt_field="prompt")
    head = Head(f"cmpl-{secrets.token_hex(12)}", int(time.time()), body.model, gateway.system_fingerprint)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    names = None if body.told_logprobs is None else gateway.chat.names
    texts = [_text(body, turn.choice, turn.rendered.text) for turn in exchange.turns]
    form = CompletionForm(head, names, len(exchange.turns), include_usage, texts if body.echo else None)
    if not body.stream:
        return WholeAnswer(exchange, form)
    return StreamedAnswer(exchange, form, gateway.settings.sse_keepalive_seconds)


def _render(gateway: Gateway, body: CompletionRequest, prompt: Prompt) -> Render:
    if isinstance(prompt, str):
        return functools.partial(gateway.chat.plain, prompt, add_special_tokens=body.add_special_tokens is not False)
    most = gateway.chat.names.num_tokens
    beyond = next((token_id for token_id in prompt if token_id >= most), None)
    if beyond is not None:
        message = f"'prompt' holds token {beyond}, and this model's ids are below {most}."
        raise InvalidRequest(message, "prompt", "invalid_value")
    return functools.partial(gateway.chat.given, prompt)


def _text(body: CompletionRequest, choice: int, rendered: str) -> str:
    """What an echo repeats: the prompt as it came, or what its ids say."""
    prompt = body.prompt_of(choice)
    return prompt if isinstance(prompt, str) else rendered
