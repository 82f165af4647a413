"""`/admin`: one page and its numbers as JSON."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response

from app import cookies
from app.admin import page
from app.admin.login import LogInRequest
from app.admin.state import state
from app.gateway import gateway_of

router = APIRouter(prefix="/admin", include_in_schema=False)

PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]

SCRIPT = "text/javascript; charset=utf-8"
ASSETS = {"admin.css": "text/css; charset=utf-8", "admin.js": SCRIPT, "login.js": SCRIPT}


@router.get("")
async def admin(request: Request, page_number: Annotated[PageNumber, Query(alias="page")] = 1) -> Response:
    """The page, with one page of the sessions."""
    return HTMLResponse(page.page(gateway_of(request.app), page_number), headers=page.HEADERS)


@router.get("/live")
async def live(request: Request, page_number: Annotated[PageNumber, Query(alias="page")] = 1) -> Response:
    """The part of the page that changes."""
    return HTMLResponse(page.live(gateway_of(request.app), page_number), headers=page.HEADERS)


@router.get("/api/state")
async def api_state(request: Request) -> Response:
    """Every counter of the store and of the turns."""
    return JSONResponse(state(gateway_of(request.app)), headers={"cache-control": "no-store"})


@router.get("/admin.css")
@router.get("/admin.js")
@router.get("/login.js")
async def asset(request: Request) -> Response:
    """The page's own style and script."""
    name = request.url.path.rpartition("/")[2]
    headers = {"content-type": ASSETS[name], "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return FileResponse(page.FOLDER / name, headers=headers)


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
