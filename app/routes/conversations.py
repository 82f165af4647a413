"""`/v1/conversations`: an id to go on under. From its first turn on a conversation is a session of that id."""

import time
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from app.bodies import Body, Text
from app.errors import InvalidRequest
from app.gateway import gateway_of
from app.replies import BY_CONVERSATION, ReplyUnknown
from app.scopes import scope

router = APIRouter(prefix="/v1")


class ConversationRequest(Body):
    """What a conversation may begin with: nothing but its name."""

    metadata: Annotated[dict[str, Text], Field(max_length=16)] | None = None
    items: list[object] | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None


class Conversation(BaseModel):
    """As OpenAI tells of one."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(BaseModel):
    """It is gone."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


@router.post("/conversations")
async def begin(request: Request, body: ConversationRequest | None = None) -> Conversation:
    """A new conversation; nothing has been said in it."""
    body = body or ConversationRequest()
    if body.items:
        message = "'items' is not supported by this server: send them as the first response's 'input'."
        raise InvalidRequest(message, "items", "unsupported_parameter")
    gateway = gateway_of(request.app)
    conversation_id = gateway.conversations.begin(scope(body.cache_salt))
    return Conversation(id=conversation_id, created_at=int(time.time()), metadata=body.metadata or {})


@router.delete("/conversations/{conversation_id}")
async def delete(request: Request, conversation_id: str, cache_salt: str | None = None) -> ConversationDeleted:
    """Forget it, and all that was said in it."""
    gateway, own = gateway_of(request.app), scope(cache_salt)
    was_begun = gateway.conversations.forget(own, conversation_id)
    if not gateway.keeper.forget(own, conversation_id) and not was_begun:
        message = f"Conversation with id '{conversation_id}' not found."
        raise ReplyUnknown(message, BY_CONVERSATION, "conversation_not_found")
    await gateway.keeper.settled()
    return ConversationDeleted(id=conversation_id)
