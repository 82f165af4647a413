"""How the process itself does: the event loop's lag, what waits for a thread, the disk, and its settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from app.disk_health import disk_state, standing
from app.report import milliseconds
from app.settings import SECRETS, Panel, Settings, flag, panel

if TYPE_CHECKING:
    from app.admin.live import Live
    from app.gateway import Gateway
    from kvstore.snapshot import Snapshot


def health(gateway: Gateway, live: Live) -> dict[str, object]:
    """As of now; nothing is asked of a disk, which may hang."""
    snapshot, process = gateway.manager.snapshot(), psutil.Process()
    lags = sorted(live.lags)
    return {
        **standing(gateway),
        "lag": {
            "samples": len(lags),
            "p50_ms": milliseconds(lags[len(lags) // 2]) if lags else None,
            "p99_ms": milliseconds(lags[min(len(lags) - 1, len(lags) * 99 // 100)]) if lags else None,
            "worst_ms": milliseconds(lags[-1]) if lags else None,
        },
        "viewers": live.num_viewers,
        "queues": {
            "turns waiting for their key": gateway.queue.waiting,
            "turns in the queue": snapshot.turns.waiting,
            "turns waking": snapshot.turns.waking,
            "templates and tokenizers": gateway.text_jobs,
            "copies between tiers": snapshot.transfers,
            "blocks to be written to NVMe": snapshot.sinking_blocks,
        },
        "memory_bytes": process.memory_info().rss,
        "threads": process.num_threads(),
        "disk": disk_state(gateway),
        "nvme_bytes_last_day": snapshot.nvme_bytes_last_day,
        "nvme_rated_bytes_per_day": gateway.nvme_rated_bytes_per_day,
        "write_policy": snapshot.nvme_write_policy,
        "gate": gate(gateway, snapshot),
        "model": {
            "name": gateway.names.first,
            "fingerprint": gateway.system_fingerprint,
            "block_tokens": gateway.block_tokens,
            "block_bytes": gateway.block_bytes,
            "max_context": gateway.max_context,
        },
        "settings": settings_in_force(gateway.settings),
    }


def gate(gateway: Gateway, snapshot: Snapshot) -> dict[str, object]:
    """Restore or recompute: the rates it judges by, and what it has decided since the start."""
    return {
        "mode": gateway.settings.cost_gate,
        "prefill_tokens_per_second": round(snapshot.prefill_tokens_per_second, 1),
        "read_tokens_per_second": {
            counts.tier.name.lower(): round(counts.read_blocks_per_second * gateway.block_tokens, 1)
            for counts in snapshot.tiers[1:]
        },
        "recomputed_because_cheaper": snapshot.totals.recomputes_cheaper,
        "blocks_loaded": snapshot.totals.loaded,
    }


def settings_in_force(settings: Settings) -> list[dict[str, object]]:
    """Every setting under its heading; a secret is only said to be set."""
    fresh = Settings()
    return [
        {
            "heading": heading.value,
            "name": flag(field),
            "value": _plain(settings, field),
            "is_default": getattr(settings, field) == getattr(fresh, field),
        }
        for heading in Panel
        for field in Settings.model_fields
        if panel(field) == heading
    ]


def _plain(settings: Settings, field: str) -> str:
    value = getattr(settings, field)
    if field in SECRETS:
        return "set" if value is not None else "not set"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, Path):
        return str(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
