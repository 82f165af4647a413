"""The page that asks for the admin key, and what becomes of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import StringConstraints
from starlette.responses import HTMLResponse, Response

from app import cookies
from app.admin.page import FOLDER, HEADERS
from app.bodies import Body, Text
from app.budgets import Bucket
from app.errors import ErrorReply

if TYPE_CHECKING:
    from app.cookies import AdminCookies
    from app.keys import Keyring

TRIES_PER_MINUTE = 20


def page() -> Response:
    """Status 401, and a form."""
    return HTMLResponse((FOLDER / "login.html").read_text(encoding="utf-8"), 401, headers=HEADERS)


class LogInRequest(Body):
    """`POST /admin/login`."""

    key: Annotated[Text, StringConstraints(max_length=1024)]


class LogIn:
    """Exchanges the admin key for a cookie."""

    def __init__(self, keys: Keyring, made: AdminCookies) -> None:
        self._keys = keys
        self._cookies = made
        self._tries = Bucket(TRIES_PER_MINUTE)

    def try_key(self, key: str, is_https: bool) -> Response:
        """204 with the cookie, 401, or 429 where somebody guesses."""
        wait = self._tries.wait_for(1)
        if wait > 0:
            message = "Too many tries; wait a while."
            return ErrorReply(429, message, code="rate_limit_exceeded", retry_after_seconds=wait).response()
        if not self._keys.is_admin(key):
            self._tries.take(1)
            return ErrorReply(401, "That is not the admin key.", "authentication_error", "invalid_admin_key").response()
        response = Response(status_code=204)
        response.set_cookie(
            cookies.NAME,
            self._cookies.value(),
            max_age=cookies.KEPT_SECONDS,
            path="/",
            secure=is_https,
            httponly=True,
            samesite="strict",
        )
        return response
