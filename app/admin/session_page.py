"""One session: its branches, what it would take to wake them or to compute them again, and its last turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.admin.listing import row
from app.report import milliseconds
from app.session_view import branch_object
from kvstore.cost import RECOMPUTE_MARGIN
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.gateway import Gateway
    from kvstore.clocks import Clocks
    from kvstore.session import Branch, Session
    from kvstore.snapshot import Snapshot


def session_page(gateway: Gateway, session: Session, clocks: Clocks) -> dict[str, object]:
    """All of it; never a prompt, and of a divergence what the settings let be shown."""
    snapshot = gateway.manager.snapshot()
    branches = sorted(session.branches.values(), key=lambda branch: branch.index)
    return {
        **row(gateway, session, clocks),
        "created_at": clocks.unix(session.created),
        "shows_text": gateway.shows_text,
        "branches": [
            {**branch_object(branch, clocks, gateway.store), "estimate": estimate(gateway, branch, snapshot)}
            for branch in branches
        ],
        "last_turns": gateway.board.log.of(session),
    }


def estimate(gateway: Gateway, branch: Branch, snapshot: Snapshot) -> dict[str, object]:
    """Milliseconds to bring the branch up to HBM, and to compute what is below it again; None where never measured.

    `decision` is what the gate would choose for all of it: `restore`, `recompute`, or `awake` where nothing is below.
    """
    keys, found = branch.block_keys, gateway.store.blocks_by_tier(branch.block_keys)
    below = max(0, len(keys) - found.get(Tier.HBM, 0))
    from_nvme = max(0, min(below, len(keys) - found.get(Tier.HBM, 0) - found.get(Tier.DRAM, 0)))
    if not below:
        return {"blocks": 0, "restore_ms": 0.0, "recompute_ms": 0.0, "decision": "awake"}
    rates = {counts.tier: counts.read_blocks_per_second for counts in snapshot.tiers}
    prefill = snapshot.prefill_tokens_per_second
    restore = _seconds(below, rates.get(Tier.DRAM, 0.0))
    if from_nvme:
        slow = _seconds(from_nvme, rates.get(Tier.NVME, 0.0))
        restore = None if restore is None or slow is None else restore + slow
    recompute = below * gateway.block_tokens / prefill if prefill > 0 else None
    is_cheaper = restore is not None and recompute is not None and RECOMPUTE_MARGIN * recompute < restore
    is_asked = gateway.settings.cost_gate == "auto"
    return {
        "blocks": below,
        "restore_ms": None if restore is None else milliseconds(restore),
        "recompute_ms": None if recompute is None else milliseconds(recompute),
        "decision": "recompute" if is_asked and is_cheaper else "restore",
    }


def _seconds(blocks: int, per_second: float) -> float | None:
    return blocks / per_second if per_second > 0 else None
