"""Whose sessions a request can meet.

Like K/V, neither ids nor texts are seen across tenants, nor across the salts of one: a caller that sends no
`cache_salt` meets its own unsalted sessions only, and one that knows a salt those under it. A tenant's name has no
NUL, so no salt can make one scope look like another.
"""

from __future__ import annotations

from app import tenants


def tenant() -> str:
    """The name of the tenant for whom this runs, as namespaces have it."""
    return tenants.current().name


def scope(cache_salt: str | None) -> str:
    """Where the book keeps the sessions of the tenant for whom this runs."""
    return tenant() if cache_salt is None else f"{tenant()}\0{cache_salt}"


def owner(scope: str) -> str:
    """The name of the tenant whose scope this is; empty where there are no keys."""
    return scope.partition("\0")[0]


def is_salted(scope: str) -> bool:
    """Salts are secrets: that there is one may be shown, not which."""
    return "\0" in scope
