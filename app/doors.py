"""What a request must look like before anybody asks who sent it.

    Host           a name that this server goes by, while there are no API keys: a page of another site that had its
                   own name resolve to this machine (DNS rebinding) still sends that name
    Origin         with what changes state: this server's own, or one that --cors-origin names. Browsers send it,
                   other clients do not
    Content-Type   application/json with a body, and from a browser always: no form of another site can send it
                   without asking first
    headers        at most MAX_HEADERS of MAX_HEADER_BYTES in all

Pages of other sites are kept out by the first three together; docs/decisions/010 has the reasons.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from app.errors import ErrorReply
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from app.settings import Settings

ANY = "*"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
PERMISSION = "permission_error"

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
"""Names and values together. Browsers and agents stay below 8 KB; a proxy's identity headers and cookies may not."""


class HeaderLimit:
    """Refuses more headers than any client has reason to send."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
                await headers_too_large().response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


def headers_too_large() -> ErrorReply:
    """431."""
    message = f"The request's headers are more than {MAX_HEADERS}, or larger than {MAX_HEADER_BYTES} bytes."
    return ErrorReply(431, message, code="headers_too_large")


class Doors:
    """Refuses what a page of another site could have sent; `hosts` None takes any Host."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None, origins: Sequence[str] = ()) -> None:
        self.app = app
        self._hosts = None if hosts is None or ANY in hosts else frozenset(hosts)
        self._origins = re.compile(origin_pattern(origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ErrorReply | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        # Without one it is no browser's: HTTP/1.1 servers refuse that themselves, HTTP/1.0 knew no such header.
        if host is not None and not self._is_ours(host):
            return _host_refused(host)
        if scope["method"] in SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin is not None and not self._may_change(origin, host):
            return _origin_refused(origin)
        if scope["method"] in BODY_METHODS and not _is_json(headers):
            is_from_browser = origin is not None or "sec-fetch-site" in headers
            if is_from_browser or _has_body(headers):
                return _not_json()
        return None

    def _is_ours(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = host_name(host)
        return is_loopback_name(name) or name in self._hosts

    def _may_change(self, origin: str, host: str | None) -> bool:
        # Compared with the Host as it came and not with a scheme: TLS may end at a proxy before this server.
        own = host is not None and origin.partition("://")[2].lower() == host.lower()
        return own or self._origins.fullmatch(origin.lower()) is not None


def check_binding(settings: Settings, has_keys: bool) -> None:
    """Without keys, only this machine is served, unless it is said that others may be.

    Raises:
        SettingInvalid: `host` can be reached by others.
    """
    if not (has_keys or settings.allow_no_auth or is_loopback_name(settings.host)):
        raise SettingInvalid(
            "--host",
            f"others could reach {settings.host} and use this server without a key; give it keys (--api-keys-file, "
            f"DORMOUSE_API_KEYS), or let everybody in with --allow-no-auth",
        )


def host_name(host: str) -> str:
    """The name in a Host header, without port, brackets, case and final dot."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_loopback_name(name: str) -> bool:
    """Whether only this machine goes by `name`; a public name server cannot make other names of these."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def origin_pattern(origins: Sequence[str]) -> str:
    """A pattern that matches the origins named, whole and in lower case; none named, none matched."""
    if ANY in origins:
        return r".*"
    alternatives = [re.escape(origin).replace(r":\*", r"(:\d+)?") for origin in origins]
    return "|".join(alternatives) if alternatives else r"(?!)"


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0").strip() != "0" or "transfer-encoding" in headers


def _host_refused(host: str) -> ErrorReply:
    message = (
        f"This server does not go by the name '{host[:100]}'. While it asks for no API keys it answers to loopback "
        f"names only; start it with --allowed-host to name another, or with --api-keys-file."
    )
    return ErrorReply(403, message, PERMISSION, code="host_not_allowed")


def _origin_refused(origin: str) -> ErrorReply:
    message = (
        f"Pages of '{origin[:100]}' may not change anything here. Start the server with --cors-origin to let them."
    )
    return ErrorReply(403, message, PERMISSION, code="origin_not_allowed")


def _not_json() -> ErrorReply:
    message = "The request body must be JSON, sent with the header Content-Type: application/json."
    return ErrorReply(415, message, code="unsupported_media_type")
