"""The composition root of the HTTP side: routes, middleware, errors, and the gateway they share.

Middleware from the outside in: request ids (every response has one), CORS where it is asked for (also on errors), the
last resort (an exception nobody translated becomes a plain 500), limits of headers, the doors (Host, Origin,
Content-Type), keys, limits of bodies, then FastAPI with the handlers of errors.py. No body is read for a stranger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app import errors, keys, startup
from app.admin import live
from app.admin.login import LogIn
from app.auth import Auth
from app.boundary import REQUEST_ID, BodyLimit, LastResort, RequestIds
from app.cookies import AdminCookies
from app.doors import Doors, HeaderLimit, host_name, origin_pattern
from app.errors import ErrorObject
from app.json_limits import JsonLimits
from app.routes import (
    admin,
    admin_sessions,
    chat,
    completions,
    conversations,
    disk,
    embeddings,
    health,
    messages,
    metrics,
    models,
    responses,
    sessions,
)
from app.traces import CallersSpan
from dormouse_gateway import __version__

if TYPE_CHECKING:
    from app.admin.live import Live
    from app.gateway import Gateway
    from app.settings import Settings


def end_streams(app: FastAPI) -> None:
    """What has no end of its own, before a server waits for what has one; harmless where none has begun."""
    live: Live | None = getattr(app.state, "live", None)
    if live is not None:
        live.close()


def create_app(
    settings: Settings,
    opened: Callable[[Settings], AbstractAsyncContextManager[Gateway]] = startup.opened,
) -> FastAPI:
    """The ASGI application; `opened` makes the gateway when it starts and drains it when it stops.

    Raises:
        SettingInvalid: a key, or the file of keys, is none.
    """
    ring, cookies = keys.load(settings), AdminCookies()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings) as gateway, live.running(gateway.board) as app.state.live:
            app.state.gateway = gateway
            try:
                yield
            finally:
                gateway.keeper.close()

    # Its own pages of documentation would load scripts from elsewhere into the origin that /admin's cookie is for.
    app = FastAPI(
        title="Dormouse",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        responses={status: {"model": ErrorObject, "description": "Refused, or failed"} for status in ("4XX", "5XX")},
    )
    app.state.log_in = LogIn(ring, cookies)
    app.state.process_key = cookies.process_key
    errors.install(app)
    dialects = (chat, completions, messages, responses, conversations, embeddings)
    for routes in (*dialects, models, sessions, admin, admin_sessions, disk, health, metrics):
        app.include_router(routes.router)
    if settings.otel_endpoint is not None:
        app.add_middleware(CallersSpan)
    app.add_middleware(JsonLimits)
    app.add_middleware(BodyLimit)
    app.add_middleware(Auth, keys=ring, cookies=cookies, guard_metrics=settings.guard_metrics)
    hosts = None if ring.has_keys else (*settings.allowed_host, host_name(settings.host))
    app.add_middleware(Doors, hosts=hosts, origins=settings.cors_origin)
    app.add_middleware(HeaderLimit)
    app.add_middleware(LastResort)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origin_regex=f"(?i:{origin_pattern(settings.cors_origin)})",
            allow_methods=["GET", "POST", "PATCH", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-session-id", REQUEST_ID, "retry-after", "retry-after-ms"],
        )
    app.add_middleware(RequestIds)
    return app
