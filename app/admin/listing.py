"""The sessions of all tenants, searched, sorted and in pages, of a hundred thousand as of ten.

The event loop is shared with the turns: sessions are looked at CHUNK at a time, and only those of the page that is
shown are asked where their blocks are.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from app.scopes import is_salted, owner
from app.session_view import terms_object

if TYPE_CHECKING:
    from app.gateway import Gateway
    from kvstore.clocks import Clocks
    from kvstore.session import Session

CHUNK = 2_000
"""Two milliseconds or so."""

Sort = Literal["last_active", "id", "tenant", "branches", "tokens", "turns", "priority", "returns"]
Order = Literal["asc", "desc"]


def tokens_of(session: Session) -> int:
    """Of all branches."""
    return sum([branch.history.num_tokens for branch in session.branches.values()])


def returns_of(session: Session) -> float | None:
    """The earliest moment at which a client means to be back."""
    told = (branch.expected_return for branch in session.branches.values())
    return min((moment for moment in told if moment is not None), default=None)


KEYS: dict[Sort, Callable[[Session], Any]] = {
    "last_active": lambda session: session.last_active,
    "id": lambda session: session.id.lower(),
    "tenant": lambda session: owner(session.tenant),
    "branches": lambda session: len(session.branches),
    "tokens": tokens_of,
    "turns": lambda session: session.turns,
    "priority": lambda session: session.terms.priority,
    "returns": lambda session: returns_of(session) or float("inf"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """Which sessions; `text` is part of an id, of a parent's or of a tenant's name, in any case. Pages count from 1."""

    text: str = ""
    sort: Sort = "last_active"
    order: Order = "desc"
    page: int = 1
    limit: int = 50

    @property
    def end(self) -> int:
        return self.page * self.limit


async def listing(gateway: Gateway, asked: Question, clocks: Clocks) -> dict[str, object]:
    """One page, and how many there are in all."""
    found, matched = await _found(gateway, asked)
    return {
        "total": len(gateway.book),
        "matched": matched,
        "page": asked.page,
        "pages": max(1, -(-matched // asked.limit)),
        "sessions": [row(gateway, session, clocks) for session in found if not session.is_forgotten],
    }


async def _found(gateway: Gateway, asked: Question) -> tuple[list[Session], int]:
    book = gateway.book
    if not asked.text and asked.sort == "last_active" and asked.order == "desc":
        return book.recent(asked.end - asked.limit, asked.limit), len(book)
    everyone, text, key = book.recent(0, len(book)), asked.text.lower(), KEYS[asked.sort]
    keyed: list[tuple[Any, int, Session]] = []
    for start in range(0, len(everyone), CHUNK):
        for place, session in enumerate(everyone[start : start + CHUNK], start):
            if not text or _matches(session, text):
                keyed.append((key(session), place if asked.order == "asc" else -place, session))
        await asyncio.sleep(0)
    # Of equals the most recently active comes first. Places differ, so that sessions are never compared.
    choose = heapq.nsmallest if asked.order == "asc" else heapq.nlargest
    chosen = await gateway.in_thread(choose, asked.end, keyed)
    return [session for _, _, session in chosen[asked.end - asked.limit :]], len(keyed)


def _matches(session: Session, text: str) -> bool:
    return text in session.id.lower() or text in (session.parent_id or "").lower() or text in owner(session.tenant)


def row(gateway: Gateway, session: Session, clocks: Clocks) -> dict[str, object]:
    """One line; `blocks` are those of its latest branch by tier, of `blocks_in_all`."""
    latest, returns = session.latest, returns_of(session)
    keys = () if latest is None else latest.block_keys
    found = gateway.store.blocks_by_tier(keys) if keys else {}
    due = [branch.expires_at for branch in session.branches.values() if branch.expires_at is not None]
    return {
        "number": session.serial,
        "id": session.id,
        "tenant": owner(session.tenant),
        "is_salted": is_salted(session.tenant),
        "parent_id": session.parent_id,
        "branches": len(session.branches),
        "turns": session.turns,
        "tokens": tokens_of(session),
        "blocks": {tier.name.lower(): count for tier, count in found.items()},
        "blocks_in_all": len(keys),
        "is_busy": session.is_busy,
        "last_active_at": clocks.unix(session.last_active),
        "returns_at": None if returns is None else clocks.unix(returns),
        "expires_at": clocks.unix(min(due)) if due else None,
        **terms_object(latest.terms if latest is not None else session.terms),
    }
