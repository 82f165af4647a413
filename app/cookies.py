"""The cookie that stands for the admin key in a browser.

`<expiry, Unix seconds>.<HMAC of it>`, under a secret of this process: it says nothing of the key, cannot be made from
the keys' file, and a restart ends it. Scripts cannot read it, and no other site's page has it sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "dormouse_admin"
KEPT_SECONDS = 12 * 3600
SECRET_BYTES = 32


class AdminCookies:
    """Makes and checks them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self.process_key = secrets.token_urlsafe(SECRET_BYTES)
        """Opens /admin as the admin key does, for as long as this process runs: for commands of its own user, who
        reads it from a file that nobody else can (disk_address.py)."""
        self._clock = clock

    def value(self) -> str:
        """A cookie's value that is valid from now on."""
        expiry = str(int(self._clock()) + KEPT_SECONDS)
        return f"{expiry}.{self._mark(expiry)}"

    def is_valid(self, header: str) -> bool:
        """Whether a `Cookie` header has one of ours that is not past its time."""
        try:
            morsel = SimpleCookie(header).get(NAME)
        except CookieError:
            return False
        expiry, _, mark = (morsel.value if morsel is not None else "").partition(".")
        if not (expiry.isascii() and expiry.isdecimal() and len(expiry) < 16):
            return False
        return hmac.compare_digest(mark.encode(), self._mark(expiry).encode()) and self._clock() < int(expiry)

    def is_process_key(self, key: str) -> bool:
        """Whether somebody shows it."""
        return hmac.compare_digest(self.process_key.encode(), key.encode())

    def _mark(self, expiry: str) -> str:
        return hmac.new(self._secret, expiry.encode(), hashlib.sha256).hexdigest()
