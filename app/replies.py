"""Answers that a client goes on from by id: what was said up to them, and what is kept of a new one.

    previous_response_id    the messages up to that answer; its session goes on
    conversation            those up to its newest answer

Both decide the prompt, so one that is not known is refused, and so is another tenant's, or one under another salt.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app import scopes
from app.errors import ApiError, ErrorReply, NotReady
from app.messages import Message
from app.sessions import SessionName
from kvstore import replies
from kvstore.history import History, Reply, Unread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.gateway import Gateway
    from app.response_request import ResponsesRequest
    from kvstore.session import Branch, Session
    from models.deltas import Said

BY_RESPONSE = "previous_response_id"
BY_CONVERSATION = "conversation"

UNREADABLE_SECONDS = 1.0
"""What to wait for a disk that does not answer."""


class ReplyUnknown(ApiError):
    """There is no such answer or conversation of this caller's."""

    def __init__(self, message: str, param: str, code: str) -> None:
        super().__init__(ErrorReply(404, message, param=param, code=code))


@dataclass(frozen=True, slots=True)
class Held:
    """An answer, and the history of the branch that has it."""

    session: Session
    history: History
    reply: Reply


@dataclass(frozen=True, slots=True)
class Before:
    """What a request goes on from: nothing, as far as it does not say."""

    name: SessionName | None = None
    messages: tuple[Message, ...] = ()
    previous: str | None = None


NOTHING_BEFORE = Before()


async def before(gateway: Gateway, request: ResponsesRequest) -> Before:
    """What `request` goes on from.

    Raises:
        ReplyUnknown: it names an answer or a conversation that is not there.
        NotReady: it is there, and the disk that has it does not answer.
    """
    gateway.keeper.expire()
    scope = scopes.scope(request.salt)
    if request.previous_response_id is not None:
        held = await held_reply(gateway, scope, request.previous_response_id)
        if held is None:
            message = f"Previous response with id '{request.previous_response_id}' not found."
            raise ReplyUnknown(message, BY_RESPONSE, "previous_response_not_found")
        return _after(held, BY_RESPONSE)
    if request.conversation is not None:
        return await _conversation(gateway, scope, request.conversation.id)
    return NOTHING_BEFORE


async def held_reply(gateway: Gateway, scope: str, reply_id: str) -> Held | None:
    """The answer of that id; raises NotReady as `before`."""
    for session, branch in gateway.book.holders(scope, replies.reply_digest(reply_id)):
        history = await _read(gateway, scope, session, branch)
        reply = None if history is None else replies.find(history, reply_id)
        if history is not None and reply is not None:
            return Held(session, history, reply)
    return None


async def _conversation(gateway: Gateway, scope: str, conversation_id: str) -> Before:
    session = gateway.book.get(scope, conversation_id)
    found = []
    for branch in list(session.branches.values()) if session is not None else ():
        assert session is not None
        history = await _read(gateway, scope, session, branch)
        if history is not None and history.replies:
            found.append(Held(session, history, history.replies[-1]))
    if found:
        gateway.conversations.forget(scope, conversation_id)  # from now on it lasts as long as its session
        return _after(max(found, key=lambda held: held.reply.made), BY_CONVERSATION)
    was_more = gateway.book.former(scope, conversation_id) is not None
    if was_more or not gateway.conversations.has(scope, conversation_id):
        message = f"Conversation with id '{conversation_id}' not found."
        raise ReplyUnknown(message, BY_CONVERSATION, "conversation_not_found")
    return Before(SessionName(conversation_id, BY_CONVERSATION))


async def _read(gateway: Gateway, scope: str, session: Session, branch: Branch) -> History | None:
    if isinstance(branch.history, Unread):
        await gateway.keeper.recall(scope, session.id)
    if isinstance(branch.history, History):
        return branch.history
    if session.branches.get(branch.index) is branch:
        message = "The disk that has this conversation does not answer now; try again."
        raise NotReady(message, "history_unreadable", UNREADABLE_SECONDS)
    return None


def _after(held: Held, source: str) -> Before:
    messages = tuple(Message.model_validate(one) for one in replies.told(held.history, held.reply))
    return Before(SessionName(held.session.id, source), messages, held.reply.id)


@dataclass(frozen=True, slots=True)
class ReplyDraft:
    """What is to be kept of an answer once it is there. `say` reads its text; `new` came after `before`."""

    id: str
    before: Before
    new: tuple[Message, ...]
    asked: tuple[str, ...]
    say: Callable[[str], Said]

    def kept(self, history: History, earlier: Sequence[Reply], text: str) -> History:
        """`history`, with this answer beside the `earlier` ones of its branch."""
        reply = Reply(
            self.id,
            made=time.time(),
            previous=self.before.previous,
            num_tokens=history.num_tokens,
            ids_digest=replies.ids_digest(history.token_ids),
            asked=self.asked,
        )
        new = [*_plain(self.new), *_answer(self.say(text))]
        return replies.keep(history, earlier, _plain(self.before.messages), reply, new)


def _plain(messages: Iterable[Message]) -> list[object]:
    return [message.model_dump(exclude_none=True) for message in messages]


def _answer(said: Said) -> list[object]:
    """The assistant's message; none where the prompt was only computed ahead."""
    if not (said.content or said.reasoning or said.calls):
        return []
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return [message]


def asked_of(request: ResponsesRequest) -> tuple[str, ...]:
    """What else than messages goes into the prompt: the tools and the effort, in few letters."""
    tools = json.dumps([tool.as_object() for tool in request.tools or ()], sort_keys=True)
    effort = None if request.reasoning is None else request.reasoning.effort
    return (hashlib.blake2b(tools.encode(), digest_size=8).hexdigest(), effort or "")
