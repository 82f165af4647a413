"""What `POST /v1/sessions/{id}/sleep` does and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.types import Tier

if TYPE_CHECKING:
    from app.gateway import Gateway
    from kvstore.session import Session


async def sleep_session(gateway: Gateway, session: Session, target: Tier) -> dict[str, object]:
    """Let the idle branches of a session leave what is above `target`; returns when their copies there are made."""
    idle = [branch for branch in session.branches.values() if branch.keys and not branch.is_busy]
    if target is Tier.DRAM or gateway.disk is not None:
        tokens = sum([await gateway.store.sleep(branch.block_keys, target) for branch in idle])
        reason = None if tokens else "busy" if session.is_busy else "not_moved" if idle else "not_stored"
    else:
        tokens, reason = 0, "no_such_tier"
    return {
        "object": "session.sleep",
        "session_id": session.id,
        "status": "declined" if reason else "asleep",
        "reason": reason,
        "tier": target.name.lower(),
        "tokens": tokens,
    }
