"""`/admin/api/sessions`: the sessions of every tenant, for who runs the server.

A session goes by its number here, which no other has, whosever it is and under whatever salt. What may be done with
it is what `/v1/sessions/{id}` lets its owner do, and is answered in the same form.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import JSONResponse, Response

from app.admin.listing import Order, Question, Sort, listing
from app.admin.session_page import session_page
from app.deletions import delete_session
from app.gateway import Gateway, gateway_of
from app.session_bodies import ForkRequest, SessionPatch, WakeRequest
from app.sessions import new_session_id
from app.sleeps import sleep_session
from app.wakes import wake_session, withdraw_wakes
from kvstore.clocks import Clocks
from kvstore.errors import SessionUnknown
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.session import Session

router = APIRouter(prefix="/admin/api/sessions", include_in_schema=False)

MOST_LISTED = 200
NO_STORE = {"cache-control": "no-store"}


class Chosen:
    """The session of a number."""

    def __init__(self, request: Request, number: Annotated[int, Path(ge=0, lt=2**63)]) -> None:
        self.gateway: Gateway = gateway_of(request.app)
        self.gateway.keeper.expire()
        session = self.gateway.book.numbered(number)
        if session is None:
            raise SessionUnknown(str(number))
        self.session = session

    def answer(self, session: Session, status: int = 200) -> Response:
        """The session as it is now."""
        return JSONResponse(session_page(self.gateway, session, now()), status, headers=NO_STORE)


AnyChosen = Annotated[Chosen, Depends()]


def now() -> Clocks:
    """Both clocks, read together."""
    return Clocks(time.monotonic(), time.time())


@router.get("")
async def search(
    request: Request,
    q: Annotated[str, Query(max_length=256)] = "",
    sort: Sort = "last_active",
    order: Order = "desc",
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 50,
) -> Response:
    """One page of the sessions that match."""
    gateway = gateway_of(request.app)
    gateway.keeper.expire()
    asked = Question(q.strip(), sort, order, page, limit)
    return JSONResponse(await listing(gateway, asked, now()), headers=NO_STORE)


@router.get("/{number}")
async def look(chosen: AnyChosen) -> Response:
    """One session with its branches, estimates and last turns."""
    return chosen.answer(chosen.session)


@router.delete("/{number}")
async def delete(chosen: AnyChosen) -> Response:
    """As `DELETE /v1/sessions/{id}`."""
    return JSONResponse(await delete_session(chosen.gateway, chosen.session.tenant, chosen.session.id))


@router.patch("/{number}")
async def change(body: SessionPatch, chosen: AnyChosen) -> Response:
    """As `PATCH /v1/sessions/{id}`."""
    return chosen.answer(chosen.gateway.keeper.change(chosen.session.tenant, chosen.session.id, body.change))


@router.post("/{number}/fork", status_code=201)
async def fork(chosen: AnyChosen, body: ForkRequest | None = None) -> Response:
    """As `POST /v1/sessions/{id}/fork`."""
    body, source = body or ForkRequest(), chosen.session
    new_id = body.session_id or new_session_id()
    return chosen.answer(chosen.gateway.keeper.fork(source.tenant, source.id, new_id, body.branch), 201)


@router.post("/{number}/wake")
async def wake(chosen: AnyChosen, body: WakeRequest | None = None) -> Response:
    """As `POST /v1/sessions/{id}/wake`."""
    session = chosen.session
    status, answer = await wake_session(chosen.gateway, session.tenant, session.id, body or WakeRequest())
    return JSONResponse(answer, status)


@router.delete("/{number}/wake")
async def cancel_wake(chosen: AnyChosen) -> Response:
    """As `DELETE /v1/sessions/{id}/wake`."""
    return JSONResponse(withdraw_wakes(chosen.gateway, chosen.session))


@router.post("/{number}/sleep")
async def sleep(chosen: AnyChosen, tier: Literal["dram", "nvme"] = "dram") -> Response:
    """As `POST /v1/sessions/{id}/sleep`."""
    return JSONResponse(await sleep_session(chosen.gateway, chosen.session, Tier[tier.upper()]))
