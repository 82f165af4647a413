"""Whose sessions a request can meet.

Like K/V, neither ids nor texts are seen across salts: a caller that sends no `cache_salt` meets its own
unsalted sessions only, and one that knows a salt those under it.
"""

from __future__ import annotations

TENANT = ""
"""The only one, until keys tell callers apart."""


def scope(cache_salt: str | None) -> str:
    """The tenant under which the book keeps these sessions."""
    return TENANT if cache_salt is None else f"{TENANT}\0{cache_salt}"


def is_salted(scope: str) -> bool:
    """Salts are secrets: that there is one may be shown, not which."""
    return "\0" in scope
