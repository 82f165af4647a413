"""One sentence: is this server doing its work, and if not, what is to be changed (pure).

Rules are asked in order, worst first; the first that applies speaks. Each is a function of the facts, known by its
name, and says the numbers it was decided by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from app.admin.numbers import count, duration, percent, seconds_text, size

Level = Literal["working", "asleep", "change", "broken"]

LEAST_LOST_SHARE = 0.05
"""Of history, lost for one reason: below it nobody needs to change anything."""
LEAST_LOST_TOKENS = 256
"""A handful of short turns proves nothing."""
FULL_SHARE = 0.90
LEAST_REFUSED_SHARE = 0.01
LATE = ("load_timeout",)
UNSOUND = ("load_failed", "corrupt", "store_format")
GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Bytes; `lost` had no other copy when it made room, in the last hour."""

    capacity: int = 0
    used: int = 0
    is_off: bool = False

    @property
    def is_full(self) -> bool:
        return self.capacity > 0 and self.used >= FULL_SHARE * self.capacity


@dataclass(frozen=True, slots=True)
class Facts:
    """The last hour, unless the name says otherwise. `lost` are tokens by reason."""

    turns: int = 0
    turns_ever: int = 0
    refused: int = 0
    running: int = 0
    waiting: int = 0
    reused: int = 0
    recomputed: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    lost_by_clients: int = 0
    worst_client: str = ""
    wakes: int = 0
    wake_p95_seconds: float | None = None
    saved_seconds: float = 0.0
    sessions: int = 0
    evicted_bytes: int = 0
    dram: TierFacts = TierFacts()
    nvme: TierFacts = TierFacts()
    writes_every_turn: bool = True
    disk_reasons: tuple[str, ...] = ()
    is_draining: bool = False
    max_queue: int = 0
    wake_deadline_seconds: float = 0.0

    @property
    def lost_tokens(self) -> int:
        return sum(self.lost.values())

    @property
    def history(self) -> int:
        """Tokens that could have been reused."""
        return self.reused + max(self.recomputed, self.lost_tokens)

    def is_much(self, tokens: int) -> bool:
        return tokens >= LEAST_LOST_TOKENS and tokens >= LEAST_LOST_SHARE * self.history


@dataclass(frozen=True, slots=True)
class Verdict:
    """`flag` and `value` are what to start the server with, where that is the remedy."""

    rule: str
    level: Level
    sentence: str
    flag: str | None = None
    value: str | None = None


def draining(facts: Facts) -> Verdict | None:
    if not facts.is_draining:
        return None
    return Verdict("draining", "asleep", f"Shutting down: {facts.running} turns are still running.")


def disk_fails(facts: Facts) -> Verdict | None:
    if not facts.disk_reasons:
        return None
    why = facts.disk_reasons[0]
    text = f"Change this: the disk fails ({why}), and sessions are served from memory; look at the drive."
    return Verdict("disk_fails", "broken", text, "--nvme-dir")


def queue_full(facts: Facts) -> Verdict | None:
    asked = facts.turns + facts.refused
    if not facts.refused or facts.refused < LEAST_REFUSED_SHARE * asked:
        return None
    value = str(2 * max(1, facts.max_queue))
    text = (
        f"Change this: {percent(facts.refused, asked)}% of turns were refused in the last hour because the queue was "
        f"full; set --max-queue {value} (now {facts.max_queue}), or run more of these."
    )
    return Verdict("queue_full", "change", text, "--max-queue", value)


def tier_full(facts: Facts) -> Verdict | None:
    """The lowest tier dropped what was asked for again."""
    lost = facts.lost.get("evicted", 0)
    tier, name, flag = (
        (facts.nvme, "NVMe", "--nvme-bytes")
        if facts.nvme.capacity
        else (facts.dram, "DRAM", "--dram-bytes")
        if facts.dram.capacity
        else (facts.nvme, "NVMe", "--nvme-bytes")
    )
    if not facts.is_much(lost) or not (tier.is_full or not tier.capacity):
        return None
    value = roomier(tier.capacity, facts.evicted_bytes)
    why, now = (f"{name} is full", size(tier.capacity)) if tier.capacity else ("nothing is kept below HBM", "0")
    text = (
        f"Change this: {percent(lost, facts.lost_tokens)}% of lost tokens were dropped because {why}; "
        f"set {flag} {value} (now {now})."
    )
    return Verdict("nvme_full" if name == "NVMe" else "dram_full", "change", text, flag, value)


def not_written(facts: Facts) -> Verdict | None:
    lost = facts.lost.get("not_written", 0)
    if facts.writes_every_turn or not facts.nvme.capacity or not facts.is_much(lost):
        return None
    text = (
        f"Change this: {percent(lost, facts.lost_tokens)}% of lost tokens were not on disk when the server stopped; "
        f"set --nvme-write-policy every-turn."
    )
    return Verdict("not_written", "change", text, "--nvme-write-policy", "every-turn")


def reads_fail(facts: Facts) -> Verdict | None:
    lost = sum(facts.lost.get(reason, 0) for reason in UNSOUND)
    if not facts.is_much(lost):
        return None
    text = (
        f"Change this: {percent(lost, facts.lost_tokens)}% of lost tokens were on disk and could not be read whole; "
        f"run `dormouse store verify` and look at the drive."
    )
    return Verdict("reads_fail", "broken", text, "--nvme-dir")


def wakes_late(facts: Facts) -> Verdict | None:
    lost = sum(facts.lost.get(reason, 0) for reason in LATE)
    if not facts.is_much(lost):
        return None
    value = f"{2 * facts.wake_deadline_seconds:g}"
    text = (
        f"Change this: {percent(lost, facts.lost_tokens)}% of lost tokens were on their way and came too late; "
        f"set --wake-deadline-seconds {value} (now {facts.wake_deadline_seconds:g}), or use a faster drive."
    )
    return Verdict("wakes_late", "change", text, "--wake-deadline-seconds", value)


def clients_diverge(facts: Facts) -> Verdict | None:
    lost = facts.lost_by_clients
    history = facts.reused + lost
    if lost < LEAST_LOST_TOKENS or lost < 0.5 * history:
        return None
    who = f", most of it by {facts.worst_client}" if facts.worst_client else ""
    text = (
        f"Change the client: {percent(lost, history)}% of history was sent back different from what it had been"
        f"{who}; each session's page shows where."
    )
    return Verdict("clients_diverge", "change", text)


def quiet(facts: Facts) -> Verdict | None:
    if facts.turns or facts.running or facts.waiting:
        return None
    if not facts.turns_ever:
        return Verdict("quiet", "asleep", "Asleep: no turn yet. Send one, and it shows here.")
    kept = f"{count(facts.sessions)} session{'s' if facts.sessions != 1 else ''}"
    return Verdict("quiet", "asleep", f"Asleep: no turn in the last hour; {kept} kept.")


def working(facts: Facts) -> Verdict:
    had = facts.reused + facts.recomputed
    if not had:
        text = f"Working: {count(facts.turns)} turns in the last hour, none of which had a history to reuse yet."
        return Verdict("working", "working", text)
    parts = [f"{percent(facts.reused, had)}% of history reused in the last hour"]
    if facts.wakes:
        p95 = "" if facts.wake_p95_seconds is None else f", p95 {seconds_text(facts.wake_p95_seconds)}"
        parts.append(f"{count(facts.wakes)} wake{'s' if facts.wakes != 1 else ''}{p95}")
    if facts.saved_seconds >= 1:
        parts.append(f"about {duration(facts.saved_seconds)} of prefill saved")
    return Verdict("working", "working", f"Working: {', '.join(parts)}.")


RULES: tuple[Callable[[Facts], Verdict | None], ...] = (
    draining,
    disk_fails,
    reads_fail,
    queue_full,
    tier_full,
    not_written,
    wakes_late,
    clients_diverge,
    quiet,
)


def judge(facts: Facts) -> Verdict:
    """What the first rule that applies says."""
    return next((said for rule in RULES if (said := rule(facts)) is not None), working(facts))


def roomier(capacity: int, evicted: int) -> str:
    """A budget that holds what is there and what an hour dropped, half as much again, as a flag takes it."""
    wanted = max(2 * capacity, 3 * (capacity + evicted) // 2, 64 * MIB)
    unit, name = (GIB, "GiB") if wanted >= GIB else (MIB, "MiB")
    whole = 1
    while whole * unit < wanted:
        whole *= 2
    # Halfway between two powers of two is enough room more often than not.
    return f"{whole * 3 // 4 if whole >= 4 and whole * 3 // 4 * unit >= wanted else whole}{name}"
