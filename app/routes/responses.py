"""`POST /v1/responses`."""

import functools
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.answers import StreamedAnswer, WholeAnswer
from app.cache_diagnosis import Comparison
from app.chat_form import Choice
from app.chat_prompt import chat_prompt
from app.errors import ApiError, InvalidRequest, reply_for
from app.exchange import Exchange
from app.gateway import Gateway, gateway_of
from app.prompts import prepare
from app.replies import Before, Held, ReplyDraft, asked_of, before, held_reply
from app.response_form import Diagnosis, ResponseForm, ResponseHead
from app.response_ids import call_id, new_response_id
from app.response_request import ResponsesRequest, reply_here
from app.schema import ChatRequest
from app.scopes import scope
from app.sse import STREAM
from app.structure import constrain
from app.turns import Piece, Turn
from models.deltas import Said
from models.errors import TemplateFailed
from models.output import OutputParser

router = APIRouter(prefix="/v1")


@router.post("/responses", responses=STREAM)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer the input, whole or as a stream of typed events; the turn runs when the response is called."""
    gateway = gateway_of(request.app)
    gateway.names.check(body.model)
    goes_on = await before(gateway, body)
    compared = None if body.comparison is None else await held_reply(gateway, scope(body.salt), body.comparison)
    chat = body.as_chat(goes_on.messages)
    if not chat.messages:
        raise InvalidRequest("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    exchange = await _prepared(gateway, request, chat, goes_on)
    (turn,) = exchange.turns
    head = ResponseHead(new_response_id(), int(time.time()), body, goes_on)
    if body.is_kept:
        say = functools.partial(_said, gateway, chat, turn, head.id)
        turn.reply = ReplyDraft(head.id, goes_on, tuple(body.input), asked_of(body), say)
    names = gateway.chat.names if body.tells_logprobs else None
    choice = _choice(gateway.chat.parser(turn.rendered), chat)
    form = ResponseForm(head, choice, names, _diagnosis(gateway, body, compared, turn))
    if not body.stream:
        return WholeAnswer(exchange, form)
    return StreamedAnswer(exchange, form, gateway.settings.sse_keepalive_seconds)


async def _prepared(gateway: Gateway, request: Request, chat: ChatRequest, goes_on: Before) -> Exchange:
    """The turn; what is refused of the chat is called as it is called here."""
    try:
        return await prepare(
            gateway,
            chat,
            request.headers,
            [chat_prompt(gateway, chat)],
            prompt_field="input",
            constrain=constrain(gateway, chat),
            name=goes_on.name,
        )
    except (InvalidRequest, TemplateFailed) as error:
        raise ApiError(reply_here(reply_for(error))) from error


def _choice(parser: OutputParser, chat: ChatRequest) -> Choice:
    return Choice(parser, one_call=chat.parallel_tool_calls is False, is_named=chat.names_a_tool)


def _said(gateway: Gateway, chat: ChatRequest, turn: Turn, response_id: str, text: str) -> Said:
    """The whole answer as it was told, read once more: the last of it is not out yet when it is recorded."""
    choice = _choice(gateway.chat.parser(turn.rendered), chat)
    choice.add(Piece(0, text))
    choice.add(Piece(0, finish_reason="stop"))
    for index, call in enumerate(choice.said.calls):
        call.id = call_id(response_id, index, call.id)
    return choice.said


def _diagnosis(gateway: Gateway, body: ResponsesRequest, held: Held | None, turn: Turn) -> Diagnosis | None:
    if body.comparison is None:
        return None
    return Comparison(held, turn.encoded.token_ids, asked_of(body), gateway.block_tokens).told
