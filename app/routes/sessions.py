"""`/v1/sessions`: what is remembered of each, and what may be done with it.

A caller meets the sessions of its own scope only: those without a salt, or, with `cache_salt`, those under it.
Ids may contain `/`, percent-encoded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import JSONResponse, Response

from app import scopes
from app.deletions import delete_session, settle
from app.errors import InvalidRequest
from app.gateway import Gateway, gateway_of
from app.raw_paths import RawPathRoute, decoded
from app.session_bodies import ForkRequest, SessionPatch, WakeRequest
from app.session_view import session_object
from app.sessions import new_session_id
from app.sleeps import sleep_session
from app.wakes import wake_session, withdraw_wakes
from kvstore.clocks import Clocks
from kvstore.errors import SessionUnknown
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.session import Session

router = APIRouter(prefix="/v1/sessions", route_class=RawPathRoute)

MOST_LISTED = 1000


class Caller:
    """Who asks, and what of."""

    def __init__(
        self, request: Request, cache_salt: Annotated[str | None, Query(min_length=1, max_length=1024)] = None
    ) -> None:
        self.gateway: Gateway = gateway_of(request.app)
        self.scope = scopes.scope(cache_salt)
        self.gateway.keeper.expire()

    def session(self, session_id: str) -> Session:
        """One of the caller's own.

        Raises:
            SessionUnknown: it has none by that id.
        """
        session = self.gateway.book.get(self.scope, session_id)
        if session is None:
            raise SessionUnknown(session_id)
        return session

    def answer(self, session: Session, status: int = 200) -> Response:
        """The session as it is now, with where its blocks are."""
        return JSONResponse(session_object(session, now(), self.gateway.store), status)


AnyCaller = Annotated[Caller, Depends()]


def now() -> Clocks:
    """Both clocks, read together."""
    return Clocks(time.monotonic(), time.time())


@router.get("")
async def list_sessions(
    caller: AnyCaller,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 20,
    after: Annotated[str | None, Query(max_length=1024)] = None,
) -> Response:
    """The caller's sessions, newest first; `after` is the id that a page ended with, still there or not."""
    book = caller.gateway.book
    before = None if after is None else book.serial(caller.scope, after)
    if after is not None and before is None:
        raise InvalidRequest("'after' is no session of yours; list from the start.", "after", "invalid_value")
    page, clocks = book.page(caller.scope, before=before, limit=limit), now()
    return JSONResponse(
        {
            "object": "list",
            "data": [session_object(session, clocks) for session in page.sessions],
            "first_id": page.sessions[0].id if page.sessions else None,
            "last_id": page.sessions[-1].id if page.sessions else None,
            "has_more": page.before is not None,
        }
    )


@router.delete("")
async def delete_sessions(caller: AnyCaller) -> Response:
    """Forget all sessions that the caller has now."""
    count = await caller.gateway.keeper.forget_all(caller.scope)
    await settle(caller.gateway)
    return JSONResponse({"object": "list.deleted", "deleted": count})


@router.get("/{session_id}")
async def get_session(session_id: str, caller: AnyCaller) -> Response:
    """One session, its branches, and where their blocks are."""
    return caller.answer(caller.session(decoded(session_id)))


@router.delete("/{session_id}")
async def delete(session_id: str, caller: AnyCaller) -> Response:
    """Forget a session: what no other shares leaves every tier. A turn in flight runs on and leaves nothing."""
    return JSONResponse(await delete_session(caller.gateway, caller.scope, decoded(session_id)))


@router.patch("/{session_id}")
async def change_session(session_id: str, body: SessionPatch, caller: AnyCaller) -> Response:
    """Change on which terms a session's branches, and those to come, are kept."""
    return caller.answer(caller.gateway.keeper.change(caller.scope, decoded(session_id), body.change))


@router.post("/{session_id}/fork", status_code=201)
async def fork_session(session_id: str, caller: AnyCaller, body: ForkRequest | None = None) -> Response:
    """A new session that goes on from the same histories and shares their blocks."""
    body = body or ForkRequest()
    new_id = body.session_id or new_session_id()
    fork = caller.gateway.keeper.fork(caller.scope, decoded(session_id), new_id, body.branch)
    return caller.answer(fork, 201)


@router.post("/{session_id}/wake", responses={202: {"description": "Blocks are on their way"}})
async def wake(session_id: str, caller: AnyCaller, body: WakeRequest | None = None) -> Response:
    """Say that a turn is coming: 202 while blocks are on their way, 200 when they are there or will not be."""
    status, answer = await wake_session(caller.gateway, caller.scope, decoded(session_id), body or WakeRequest())
    return JSONResponse(answer, status)


@router.delete("/{session_id}/wake")
async def cancel_wake(session_id: str, caller: AnyCaller) -> Response:
    """Take a hint back: nothing more is loaded for it."""
    return JSONResponse(withdraw_wakes(caller.gateway, caller.session(decoded(session_id))))


@router.post("/{session_id}/sleep")
async def sleep(session_id: str, caller: AnyCaller, tier: Literal["dram", "nvme"] = "dram") -> Response:
    """Let a session's idle branches leave what is above `tier` now; answers when their copies there are made."""
    session = caller.session(decoded(session_id))
    return JSONResponse(await sleep_session(caller.gateway, session, Tier[tier.upper()]))
