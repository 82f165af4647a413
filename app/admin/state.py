"""The gateway's state in numbers: `/admin/api/state`, and what the page is drawn from."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from app.disk_health import disk_state
from dormouse_gateway import __version__
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.gateway import Gateway
    from kvstore.snapshot import Snapshot


def state(gateway: Gateway) -> dict[str, object]:
    """The manager's snapshot, whole, with what the HTTP side counts beside it."""
    metrics = gateway.metrics
    return {
        "model": gateway.names.first,
        "version": __version__,
        "uptime_seconds": max(0, int(time.time()) - gateway.started_at),
        "is_draining": gateway.is_draining,
        "block_tokens": gateway.block_tokens,
        "block_bytes": gateway.block_bytes,
        "max_context": gateway.max_context,
        "sessions": len(gateway.book),
        "waiting_for_their_key": gateway.queue.waiting,
        **snapshot_object(gateway.manager.snapshot()),
        "nvme": disk_state(gateway),
        "tokens": metrics.prompt_tokens(),
        "misses": metrics.misses_by_reason(),
        "turns_ended": metrics.turns_by_outcome(),
    }


def snapshot_object(snapshot: Snapshot) -> dict[str, object]:
    """Every counter under its own name; tiers by theirs."""
    plain = asdict(snapshot)
    for counts in plain["tiers"]:
        counts["tier"] = Tier(counts["tier"]).name.lower()
    return plain
