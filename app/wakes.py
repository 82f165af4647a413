"""What `POST /v1/sessions/{id}/wake` answers.

202 waking      blocks are on their way
200 awake       they are where they are wanted
200 declined    they will not come, and `reason` says why: a hint is never an error
404             only for an id that was never seen
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from app.report import milliseconds
from kvstore.errors import SessionUnknown
from kvstore.events import WakeStatus
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.gateway import Gateway
    from app.hints import Hint
    from app.session_bodies import WakeRequest
    from kvstore.session import Session

Answer = tuple[int, dict[str, object]]

TARGETS = {"hbm": Tier.HBM, "dram": Tier.DRAM}
UNKNOWN_BRANCH = "unknown_branch"
NOT_STORED = WakeStatus.NOT_STORED.value
RATE_LIMITED = "rate_limited"


async def wake_session(gateway: Gateway, scope: str, session_id: str, body: WakeRequest) -> Answer:
    """Pass a hint on, and wait for what becomes of it where that is asked for.

    Raises:
        SessionUnknown: the id was never seen.
    """
    status, answer = await _wake(gateway, scope, session_id, body)
    gateway.metrics.count_hint(str(answer["reason"] or answer["status"]))
    return status, answer


async def _wake(gateway: Gateway, scope: str, session_id: str, body: WakeRequest) -> Answer:
    session = gateway.book.get(scope, session_id)
    if session is None:
        former = gateway.book.former(scope, session_id)
        if former is None:
            raise SessionUnknown(session_id)
        return _declined(session_id, body.branch, former.why.value)
    branch = session.latest if body.branch is None else session.branches.get(body.branch)
    if branch is None:
        return _declined(session_id, body.branch, UNKNOWN_BRANCH if body.branch is not None else NOT_STORED)
    if not branch.keys:
        return _declined(session_id, branch.index, NOT_STORED)
    if not gateway.hints.has_room():
        return _declined(session_id, branch.index, RATE_LIMITED)
    hold_until = time.time() + body.hold_seconds
    hint = gateway.hints.give(session, branch, TARGETS[body.to], body.hold_seconds)
    if hint.wake.status in (WakeStatus.AWAKE, WakeStatus.WAKING):
        gateway.board.prefetches.given((session.tenant, session.id, branch.index), hint.hold_until)
    if body.wait:
        await hint.wake.settled()
    return _answer(gateway, session_id, hint, hold_until)


def withdraw_wakes(gateway: Gateway, session: Session) -> dict[str, object]:
    """Take back what was hinted for a session; that there was nothing is no error either."""
    withdrawn = gateway.hints.withdraw(session)
    for hint in withdrawn:
        gateway.board.prefetches.withdrawn((session.tenant, session.id, hint.branch))
    return {
        "object": "session.wake",
        "session_id": session.id,
        "status": "cancelled",
        "cancelled": len(withdrawn),
        "branches": [hint.branch for hint in withdrawn],
    }


def _answer(gateway: Gateway, session_id: str, hint: Hint, hold_until: float) -> Answer:
    wake = hint.wake
    if wake.status not in (WakeStatus.AWAKE, WakeStatus.WAKING):
        return _declined(session_id, hint.branch, wake.status.value)
    is_waking = wake.status is WakeStatus.WAKING
    eta = gateway.hints.pace.estimate(wake.origin, wake.tokens) if is_waking else 0.0
    return 202 if is_waking else 200, {
        "object": "session.wake",
        "session_id": session_id,
        "branch": hint.branch,
        "status": wake.status.value,
        "reason": None,
        "source": wake.origin.name.lower(),
        "tokens": wake.tokens,
        "bytes": wake.tokens // gateway.block_tokens * gateway.block_bytes,
        "eta_ms": None if eta is None else milliseconds(eta),
        "hold_until": round(hold_until, 3),
    }


def _declined(session_id: str, branch: int | None, reason: str) -> Answer:
    return 200, {
        "object": "session.wake",
        "session_id": session_id,
        "branch": branch,
        "status": "declined",
        "reason": reason,
        "source": None,
        "tokens": 0,
        "bytes": 0,
        "eta_ms": None,
        "hold_until": None,
    }
