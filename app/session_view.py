"""A session as `/v1/sessions` shows it: numbers, times and terms; never text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore.types import Tier

if TYPE_CHECKING:
    from app.store import SleepingStore
    from kvstore.clocks import Clocks
    from kvstore.session import Branch, Session
    from kvstore.terms import Terms


def session_object(session: Session, clocks: Clocks, store: SleepingStore | None = None) -> dict[str, object]:
    """The object; with a `store`, where the blocks of each branch are, as far as it tells."""
    branches = sorted(session.branches.values(), key=lambda branch: branch.index)
    return {
        "id": session.id,
        "object": "session",
        "created_at": clocks.unix(session.created),
        "last_active_at": clocks.unix(session.last_active),
        "parent_id": session.parent_id,
        "turns": session.turns,
        "tokens": sum(branch.num_tokens for branch in branches),
        "busy": session.is_busy,
        **terms_object(session.terms),
        "branches": [branch_object(branch, clocks, store) for branch in branches],
    }


def branch_object(branch: Branch, clocks: Clocks, store: SleepingStore | None) -> dict[str, object]:
    """One conversation of a session; times are null where there is none."""
    return {
        "index": branch.index,
        "turns": branch.turns,
        "tokens": branch.num_tokens,
        "busy": branch.is_busy,
        "last_active_at": clocks.unix(branch.last_active),
        "expected_return_at": _unix(branch.expected_return, clocks),
        "expires_at": _unix(branch.expires_at, clocks),
        **terms_object(branch.terms),
        "blocks": None if store is None else blocks_object(store.blocks_by_tier(branch.block_keys)),
    }


def terms_object(terms: Terms) -> dict[str, object]:
    """What its clients have asked of it."""
    return {
        "priority": terms.priority,
        "keep_seconds": terms.keep_seconds,
        "expire_seconds": terms.expire_seconds,
        "pinned": terms.pinned,
        "persist": terms.persist.value,
    }


def blocks_object(blocks: Mapping[Tier, int]) -> dict[str, int] | None:
    """Copies in each tier; a block may have several. None where the store does not tell."""
    return {tier.name.lower(): blocks.get(tier, 0) for tier in Tier} if blocks else None


def _unix(moment: float | None, clocks: Clocks) -> float | None:
    return None if moment is None else clocks.unix(moment)
