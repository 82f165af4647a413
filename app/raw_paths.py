"""Routes whose parameters may contain an encoded `/`.

Servers decode a path before it is routed, and then `sessions/a%2Fwake`, the session "a/wake", and
`sessions/a/wake`, a wake of the session "a", are the same. These routes match the path as it was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from starlette.routing import Match
    from starlette.types import Scope


class RawPathRoute(APIRoute):
    """Matches the undecoded path; parameters arrive still encoded, for `decoded`."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As APIRoute's. A server without `raw_path` (it is optional in ASGI) has only the decoded one."""
        raw = scope.get("raw_path")
        if raw is None:
            return super().matches(scope)
        return super().matches({**scope, "path": raw.decode("latin-1")})


def decoded(parameter: str) -> str:
    """A path parameter in clear; bytes that are no UTF-8 become U+FFFD, which no id has."""
    return unquote(parameter)
