"""Who may enter where, and whose request this is from here on.

    /healthz /health /readyz /version /openapi.json   anybody
    /admin and below    the admin key, as Bearer or as a cookie; its page asks for it. Without one: anybody where there
                        are no API keys either, nobody where there are
    /metrics            anybody; with --guard-metrics as /admin
    all else            an API key, where there are any: Authorization: Bearer KEY, or x-api-key as Anthropic's
                        clients send it

Closed unless it is listed: a route that somebody adds asks for a key. The two kinds open nothing of each other's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from app import tenants
from app.admin import login
from app.errors import ErrorReply

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from app.budgets import Spent
    from app.cookies import AdminCookies
    from app.keys import Keyring
    from app.tenants import Tenant

OPEN = frozenset({"/health", "/healthz", "/readyz", "/version", "/openapi.json"})
METRICS = "/metrics"
ADMIN = "/admin"
LOGIN = frozenset({"/admin/login", "/admin/logout", "/admin/static/admin.css", "/admin/static/login.js"})
"""What the way in needs itself."""

AUTHENTICATION = "authentication_error"
BUDGETED = "/v1/"
FREE = "/v1/sessions"
"""Looking after one's sessions computes nothing; hints have a limit of their own."""


class Auth:
    """Sets the tenant of each request, or refuses it."""

    def __init__(self, app: ASGIApp, keys: Keyring, cookies: AdminCookies, guard_metrics: bool = False) -> None:
        self.app = app
        self._keys = keys
        self._cookies = cookies
        self._guard_metrics = guard_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        tenants.enter(tenants.NOBODY)
        if self._is_admins(path):
            if not self._may_administer(path, headers):
                await self._refuse_admin(scope, receive, send)
                return
        elif self._keys.has_keys and path not in OPEN and path != METRICS:
            tenant = self._keys.owner(shown) if (shown := key_of(headers)) else None
            if tenant is None:
                await key_refused(bool(shown)).response({"www-authenticate": "Bearer"})(scope, receive, send)
                return
            tenants.enter(tenant)
            await self._serve(tenant, scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _serve(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or not is_budgeted(scope["path"]):
            await self.app(scope, receive, send)
            return
        spent = tenant.budget.begin()
        if spent is not None:
            await budget_spent(tenant, spent).response(dict(tenant.budget.headers()))(scope, receive, send)
            return

        async def send_with_budget(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in tenant.budget.headers():
                    headers[name] = value
            await send(message)

        await self.app(scope, receive, send_with_budget)

    def _is_admins(self, path: str) -> bool:
        return path == ADMIN or path.startswith(f"{ADMIN}/") or (self._guard_metrics and path == METRICS)

    def _may_administer(self, path: str, headers: Headers) -> bool:
        shown = key_of(headers)
        if shown is not None and (self._keys.is_admin(shown) or self._cookies.is_process_key(shown)):
            return True
        if not self._keys.has_admin:
            return not self._keys.has_keys and path != METRICS
        return path in LOGIN or self._cookies.is_valid(headers.get("cookie", ""))

    async def _refuse_admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys.has_admin:
            await no_admin_key().response()(scope, receive, send)
        elif scope["path"] == ADMIN and scope["method"] in ("GET", "HEAD"):
            await login.page()(scope, receive, send)
        else:
            await admin_refused().response({"www-authenticate": "Bearer"})(scope, receive, send)


def key_of(headers: Headers) -> str | None:
    """The key a request shows; `Authorization` decides where it says Bearer, else `x-api-key`."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip() or None
    return headers.get("x-api-key") or None


def is_budgeted(path: str) -> bool:
    """Whether a POST here asks for a turn."""
    return path.startswith(BUDGETED) and path != FREE and not path.startswith(f"{FREE}/")


def key_refused(was_shown: bool) -> ErrorReply:
    """401; the key is not repeated, since answers are logged more often than requests."""
    if was_shown:
        return ErrorReply(401, "The API key is not one of this server's.", AUTHENTICATION, code="invalid_api_key")
    message = "This server asks for an API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
    return ErrorReply(401, message, AUTHENTICATION, code="missing_api_key")


def admin_refused() -> ErrorReply:
    """401 of /admin."""
    message = "This needs the admin key: log in at /admin, or send it as 'Authorization: Bearer KEY'."
    return ErrorReply(401, message, AUTHENTICATION, code="invalid_admin_key")


def no_admin_key() -> ErrorReply:
    """403: there is none, and with tenants it is not for everybody."""
    message = (
        "This shows all tenants' sessions and needs an admin key, which this server has none of: "
        "set DORMOUSE_ADMIN_KEY, or give the keys' file an [admin] table."
    )
    return ErrorReply(403, message, "permission_error", code="no_admin_key")


def budget_spent(tenant: Tenant, spent: Spent) -> ErrorReply:
    """429, as OpenAI says it."""
    message = (
        f"Rate limit reached for the key of '{tenant.name}': {spent.per_minute} {spent.kind} per minute. "
        f"Try again in {spent.wait_seconds:.2f} s."
    )
    return ErrorReply(
        429, message, spent.kind, code="rate_limit_exceeded", retry_after_seconds=max(0.001, spent.wait_seconds)
    )
