"""`/admin`: the page, its own files, and what it shows as JSON and as a stream."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response

from app import cookies
from app.admin import page
from app.admin.health import health
from app.admin.live import MOST_VIEWERS, Live, Stream
from app.admin.login import LogInRequest
from app.errors import ErrorReply
from app.gateway import gateway_of

router = APIRouter(prefix="/admin", include_in_schema=False)

NO_STORE = {"cache-control": "no-store"}


def live_of(request: Request) -> Live:
    """The stream of a started app."""
    live: Live = request.app.state.live
    return live


@router.get("")
async def admin(request: Request) -> Response:
    """The page, which has nothing in it until its script has asked for it."""
    return HTMLResponse(page.page(gateway_of(request.app)), headers=page.HEADERS)


@router.get("/api/state")
async def api_state(request: Request, snapshot: Annotated[int | None, Query(ge=1)] = None) -> Response:
    """Every number that is shown; `snapshot` asks for the ones that were told under a number a moment ago."""
    board = gateway_of(request.app).board
    state = board.take() if snapshot is None else board.kept(snapshot)
    if state is None:
        message = f"The state of snapshot {snapshot} is not kept any more."
        return ErrorReply(404, message, code="snapshot_not_kept", param="snapshot").response()
    return JSONResponse(state, headers=NO_STORE)


@router.get("/api/events")
async def events(request: Request) -> Response:
    """The same as a stream, at most once a second: server-sent events, each the whole state."""
    live = live_of(request)
    if live.num_viewers >= MOST_VIEWERS:
        message = f"{MOST_VIEWERS} pages are watching already."
        return ErrorReply(429, message, code="too_many_viewers", retry_after_seconds=10.0).response()
    return Stream(live)


@router.get("/api/history")
async def history(request: Request, window: Literal["15m", "1h", "24h"] = "1h") -> Response:
    """First tokens by tier and misses by reason over time."""
    return JSONResponse(gateway_of(request.app).board.series(window), headers=NO_STORE)


@router.get("/api/health")
async def api_health(request: Request) -> Response:
    """How the process does, and what it was started with."""
    return JSONResponse(health(gateway_of(request.app), live_of(request)), headers=NO_STORE)


@router.get("/static/{name:path}")
async def asset(name: str) -> Response:
    """The page's own files."""
    kind = page.ASSETS.get(name)
    if kind is None:
        return ErrorReply(404, "There is no such file.", code="not_found").response()
    headers = {"content-type": kind, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return FileResponse(page.STATIC / name, headers=headers)


@router.post("/login")
async def log_in(request: Request, body: LogInRequest) -> Response:
    """The admin key for a cookie."""
    reply: Response = request.app.state.log_in.try_key(body.key, request.url.scheme == "https")
    return reply


@router.post("/logout")
async def log_out() -> Response:
    """Forget the cookie."""
    response = Response(status_code=204)
    response.delete_cookie(cookies.NAME, path="/", httponly=True, samesite="strict")
    return response
