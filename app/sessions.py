"""Where a session id may come from: the first carrier that has a valid one wins.

The id is a hint; which branch a turn continues, and what is reused, the token ids decide.

    body            session_id                   parent_session_id
                    agent_hint.session_id        agent_hint.parent_session_id        (vLLM)
                    nvext.session_control.session_id                                 (Dynamo)
    header          X-Session-ID                 X-Parent-Session-ID                 (opencode)
                    X-Dynamo-Session-ID          X-Dynamo-Parent-Session-ID
    Claude Code     X-Claude-Code-Agent-Id       X-Claude-Code-Parent-Agent-Id, else X-Claude-Code-Session-Id
                    X-Claude-Code-Session-Id, else the session inside metadata.user_id
    Codex           thread-id                    x-codex-parent-thread-id
                    session-id
    others          x-session-affinity, X-OpenWebUI-Chat-Id, X-Conversation-Id, x-litellm-session-id,
                    then every --session-header
    none            the branch whose text the prompt continues, else a new id (decided by the turn)

A header that is empty, over 256 characters or not visible ASCII is skipped: proxies and clients set them
without the user knowing. In the body the same is a 400 (schema.py), because there somebody meant it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.bodies import is_session_id

if TYPE_CHECKING:
    from app.schema import TurnRequest

AFFINITY_HEADERS = ("x-session-affinity", "x-openwebui-chat-id", "x-conversation-id", "x-litellm-session-id")

BY_TEXT = "text"
NEW = "new"


@dataclass(frozen=True, slots=True)
class Carrier:
    """A header that may hold a session id, and those that may hold its parent's, in order."""

    header: str
    parents: tuple[str, ...] = ()


CARRIERS = (
    Carrier("x-session-id", ("x-parent-session-id",)),
    Carrier("x-dynamo-session-id", ("x-dynamo-parent-session-id",)),
    Carrier("x-claude-code-agent-id", ("x-claude-code-parent-agent-id", "x-claude-code-session-id")),
    Carrier("x-claude-code-session-id"),
    Carrier("metadata.user_id"),  # no header: stands here for its place in the order
    Carrier("thread-id", ("x-codex-parent-thread-id",)),
    Carrier("session-id"),
    *(Carrier(header) for header in AFFINITY_HEADERS),
)

# Claude Code's older form: user_<hash>_account_<uuid>_session_<uuid>
_LEGACY_SESSION = re.compile(r"_session_([0-9a-fA-F-]{36})$")


@dataclass(frozen=True, slots=True)
class SessionName:
    """What a request calls its session; `id` None means it does not say."""

    id: str | None
    source: str
    parent_id: str | None = None


def session_name(request: TurnRequest, headers: Mapping[str, str], extra_headers: Sequence[str] = ()) -> SessionName:
    """The id and its source. `headers` looks names up without regard to case, as Starlette's do."""
    stated_parent = request.named_parent
    if request.named_session is not None:
        return SessionName(request.named_session, "body", stated_parent)
    for carrier in (*CARRIERS, *(Carrier(name.lower()) for name in extra_headers)):
        found = _carried(carrier.header, request, headers)
        if found is not None:
            source = carrier.header if carrier.header == "metadata.user_id" else f"header:{carrier.header}"
            return SessionName(found, source, stated_parent or _parent(carrier, found, headers))
    return SessionName(None, NEW, stated_parent)


def _carried(header: str, request: TurnRequest, headers: Mapping[str, str]) -> str | None:
    if header == "metadata.user_id":
        return _session_in_user(request.session_in_metadata)
    return _valid(headers.get(header))


def _parent(carrier: Carrier, found: str, headers: Mapping[str, str]) -> str | None:
    candidates = (_valid(headers.get(name)) for name in carrier.parents)
    return next((one for one in candidates if one is not None and one != found), None)


def _valid(value: str | None) -> str | None:
    return value if value is not None and is_session_id(value) else None


def _session_in_user(user_id: str | None) -> str | None:
    """The session in Claude Code's `metadata.user_id`; anybody else's user id names a person and is left alone."""
    if user_id is None:
        return None
    legacy = _LEGACY_SESSION.search(user_id)
    if legacy is not None:
        return legacy.group(1)
    if not user_id.startswith("{"):
        return None
    try:
        value = json.loads(user_id).get("session_id")
    except (ValueError, RecursionError):
        return None
    return _valid(value) if isinstance(value, str) else None


def new_session_id() -> str:
    """An id for a conversation that came without one."""
    return f"ses_{uuid.uuid4().hex}"
