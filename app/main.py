"""The composition root of the HTTP side: routes, middleware, errors, and the gateway they share.

Middleware from the outside in: request ids (every response has one), CORS (also on errors), the last resort (an
exception nobody translated becomes a plain 500), the limit of bodies, then FastAPI with the handlers of errors.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app import errors, startup
from app.boundary import REQUEST_ID, BodyLimit, LastResort, RequestIds
from app.routes import admin, chat, completions, disk, embeddings, health, metrics, models, sessions
from dormouse_gateway import __version__

if TYPE_CHECKING:
    from app.gateway import Gateway
    from app.settings import Settings

LOOPBACK_ORIGINS = r"(https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?|tauri://localhost)"
"""Pages of this machine may call; another site in the user's browser may not read their conversations."""


def create_app(
    settings: Settings,
    opened: Callable[[Settings], AbstractAsyncContextManager[Gateway]] = startup.opened,
) -> FastAPI:
    """The ASGI application; `opened` makes the gateway when it starts and drains it when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings) as gateway:
            app.state.gateway = gateway
            try:
                yield
            finally:
                gateway.keeper.close()

    app = FastAPI(title="Dormouse", version=__version__, lifespan=lifespan, redirect_slashes=False)
    errors.install(app)
    for routes in (chat, completions, embeddings, models, sessions, admin, disk, health, metrics):
        app.include_router(routes.router)
    app.add_middleware(BodyLimit)
    app.add_middleware(LastResort)
    app.add_middleware(
        CORSMiddleware,
        allow_origin_regex=LOOPBACK_ORIGINS,
        allow_methods=["GET", "POST", "PATCH", "DELETE", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=["x-session-id", REQUEST_ID, "retry-after", "retry-after-ms"],
    )
    app.add_middleware(RequestIds)
    return app
