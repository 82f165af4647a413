"""What the page at `/admin` shows, as values that its templates only lay out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.admin import numbers
from app.scopes import is_salted, owner
from dormouse_gateway import __version__
from kvstore.reuse import MissReason
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.gateway import Gateway
    from kvstore.session import Session
    from kvstore.snapshot import Snapshot, TierCounts

SESSIONS_SHOWN = 25

BEGINNINGS = (MissReason.NEW_SESSION, MissReason.NEW_BRANCH)
NO_LOSS = (*BEGINNINGS, MissReason.CACHE_DISABLED)

TIER_WORDS = {
    Tier.HBM: "awake, on the device",
    Tier.DRAM: "asleep in host memory",
    Tier.NVME: "asleep on disk",
}


ORIGIN_WORDS = {
    "hbm": "never left HBM",
    "dram": "woke from DRAM",
    "nvme": "woke from NVMe",
    "computed": "new, computed",
    "recomputed": "computed again",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar: from `start`, `width` long, both in per mille; `kind` chooses its colour."""

    kind: str
    name: str
    count: int
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier's bar; counts are slots."""

    name: str
    words: str
    capacity: int
    used: int
    tokens_used: str
    bytes_used: str
    bytes_in_all: str
    percent: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One session; `shares` are per mille of its blocks with a copy in each tier, empty where that is not told."""

    id: str
    is_salted: bool
    branches: int
    turns: int
    tokens: int
    shares: tuple[tuple[str, int, float], ...]
    last_active: str
    is_busy: bool
    marks: tuple[str, ...]


def view(gateway: Gateway, number: int) -> dict[str, object]:
    """What the templates show."""
    snapshot, metrics, now = gateway.manager.snapshot(), gateway.metrics, time.monotonic()
    origins = metrics.prompt_tokens()
    shown = gateway.book.recent((number - 1) * SESSIONS_SHOWN, SESSIONS_SHOWN)
    pages = max(1, -(-len(gateway.book) // SESSIONS_SHOWN))
    return {
        "model": gateway.names.first,
        "version": __version__,
        "uptime": numbers.duration(time.time() - gateway.started_at),
        "is_draining": gateway.is_draining,
        "turns": snapshot.turns,
        "sessions": len(gateway.book),
        "reused_percent": numbers.percent(sum(origins[tier.name.lower()] for tier in Tier), sum(origins.values())),
        "tiers": [tier_view(gateway, counts) for counts in snapshot.tiers],
        "origins": bar((name, ORIGIN_WORDS[name], tokens) for name, tokens in origins.items()),
        "prompt_tokens": sum(origins.values()),
        "misses": misses(metrics.misses_by_reason()),
        "beginnings": sum(metrics.misses_by_reason()[reason] for reason in BEGINNINGS),
        "events": events(snapshot),
        "rows": [row(gateway, session, now) for session in shown],
        "page": number,
        "pages": pages,
    }


def bar(counts: Iterable[tuple[str, str, int]], whole: int | None = None) -> tuple[Part, ...]:
    """Parts side by side that fill a bar, or their share of `whole`."""
    counted = list(counts)
    total = sum(count for _, _, count in counted) if whole is None else whole
    parts: list[Part] = []
    start = 0.0
    for kind, name, count in counted:
        width = 1000 * count / total if total else 0.0
        parts.append(Part(kind, name, count, round(start, 2), round(width, 2)))
        start += width
    return tuple(parts)


def tier_view(gateway: Gateway, counts: TierCounts) -> TierView:
    """A tier's slots by what they hold."""
    used = counts.capacity - counts.free
    return TierView(
        name={Tier.HBM: "HBM", Tier.DRAM: "DRAM", Tier.NVME: "NVMe"}[counts.tier],
        words=TIER_WORDS[counts.tier],
        capacity=counts.capacity,
        used=used,
        tokens_used=numbers.count(used * gateway.block_tokens),
        bytes_used=numbers.size(used * gateway.block_bytes),
        bytes_in_all=numbers.size(counts.capacity * gateway.block_bytes),
        percent=numbers.percent(used, counts.capacity),
        parts=bar(
            [
                ("pinned", "pinned", counts.pinned),
                (counts.tier.name.lower(), "kept", counts.valid - counts.pinned),
                ("open", "being computed", counts.open),
                ("filling", "being copied", counts.filling),
                ("quarantined", "overdue", counts.quarantined),
            ],
            counts.capacity,
        ),
    )


def misses(by_reason: dict[str, int]) -> list[tuple[str, int, float]]:
    """Reasons that came up, most frequent first, with their per mille of the most frequent.

    What had no history to lose is no loss and would dwarf the rest.
    """
    found = sorted(
        ((count, reason) for reason, count in by_reason.items() if count and reason not in NO_LOSS), reverse=True
    )
    return [(reason.replace("_", " "), count, round(1000 * count / found[0][0], 2)) for count, reason in found]


def events(snapshot: Snapshot) -> list[tuple[str, int]]:
    """What the store has done since it started."""
    totals = snapshot.totals
    return [
        ("turns granted", totals.turns_granted),
        ("turns suspended", totals.turns_suspended),
        ("turns resumed", totals.turns_resumed),
        ("blocks published", totals.published),
        ("blocks reused", totals.reused),
        ("blocks evicted", totals.evicted),
    ]


def row(gateway: Gateway, session: Session, now: float) -> Row:
    """One line of the table."""
    branches = session.branches.values()
    return Row(
        id=session.id,
        is_salted=is_salted(session.tenant),
        branches=len(branches),
        turns=session.turns,
        tokens=sum(branch.num_tokens for branch in branches),
        shares=_shares(gateway, session),
        last_active=numbers.duration(now - session.last_active),
        is_busy=session.is_busy,
        marks=tuple(_marks(session, now)),
    )


def _shares(gateway: Gateway, session: Session) -> tuple[tuple[str, int, float], ...]:
    keys = session.latest.block_keys if session.latest is not None else ()
    blocks = gateway.store.blocks_by_tier(keys) if keys else {}
    if not blocks:
        return ()
    tiers: Sequence[Tier] = [counts.tier for counts in gateway.manager.snapshot().tiers]
    shown = sorted({*tiers, *(tier for tier, count in blocks.items() if count)})
    return tuple(
        (tier.name.lower(), blocks.get(tier, 0), round(1000 * blocks.get(tier, 0) / len(keys), 2)) for tier in shown
    )


def _marks(session: Session, now: float) -> Iterable[str]:
    if key := owner(session.tenant):
        yield f"key {key}"
    terms = [branch.terms for branch in session.branches.values()]
    if any(each.pinned for each in terms):
        yield "pinned"
    if any(each.keep_seconds for each in terms):
        yield f"keep {numbers.duration(max(each.keep_seconds for each in terms))}"
    due = [branch.expires_at for branch in session.branches.values() if branch.expires_at is not None]
    if due:
        yield f"expires in {numbers.duration(min(due) - now)}"
    if session.parent_id is not None:
        yield f"of {session.parent_id}"
