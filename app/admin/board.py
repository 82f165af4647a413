"""All that `/admin` shows, as of one moment, under a number.

Two answers with the same number tell the same numbers: it goes up only when something that is told has changed. The
last few states are kept under theirs, so that a page, a scrape of /metrics and a program can be held against each
other while turns go on (`/admin/api/state?snapshot=N`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from app.admin import counting
from app.admin.census import Census
from app.admin.minutes import Minutes
from app.admin.prefetches import Prefetches
from app.admin.state import state
from app.admin.tiles import Now, tiles
from app.admin.turn_log import Text, TurnLog, turn_note
from app.admin.verdict import Facts, TierFacts, judge
from app.admin.windows import MINUTES, STEPS, Window, window
from app.disk_health import disk_health
from app.report import reuse
from app.scopes import is_salted
from kvstore.clocks import Clocks
from kvstore.events import TierHealth, WritePolicy
from kvstore.reuse import MissReason
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.gateway import Gateway
    from app.report import Figures, Standing
    from kvstore.session import OpenTurn, Session
    from kvstore.snapshot import Snapshot, TierCounts, Totals

MINUTE = 60
KEPT_STATES = 32
LEAST_POINTS = 12
"""Of a plot."""
MOST_CLIENTS = 20
OTHERS = "others"

ALWAYS_NEW = ("snapshot", "at", "uptime_seconds")
"""Of a state: what changes though nothing has."""

State = dict[str, object]


class Board:
    """What has been counted of a gateway's turns, and the state of everything beside it."""

    def __init__(self, gateway: Gateway, clock: Callable[[], Clocks] | None = None) -> None:
        self.log = TurnLog()
        self.prefetches = Prefetches()
        self._gateway = gateway
        self._clock = clock or (lambda: Clocks(time.monotonic(), time.time()))
        self._started = self._clock().monotonic
        self._minutes = Minutes(counting.NAMES)
        self._census = Census(gateway.book, gateway.store)
        self._clients: Counter[str] = Counter()
        """Tokens of histories that were left, by who left them, since the start."""
        self._totals: dict[str, int] = dict.fromkeys(counting.STORE_TOTALS, 0)
        self._states: deque[State] = deque(maxlen=KEPT_STATES)
        self._number = 0

    # --- what it is told ----------------------------------------------------------------------

    def turn_granted(self, place: OpenTurn | None, trigger: str | None) -> None:
        """A turn got its slots; was a hint of use to it?"""
        if place is not None:
            which = (place.session.tenant, place.session.id, place.branch.index)
            if (outcome := self.prefetches.turn_came(which, trigger)) is not None:
                self._minutes.add(self._minute(), {f"prefetch_{outcome}": 1.0})

    def turn_ended(
        self, outcome: str, standing: Standing, figures: Figures, seconds: float, place: OpenTurn | None
    ) -> None:
        """Count a turn and keep a note of it."""
        known, snapshot = reuse(standing, figures), self._gateway.manager.snapshot()
        rate = snapshot.prefill_tokens_per_second
        self._minutes.add(self._minute(), counting.turn_amounts(outcome, standing, figures, known, rate))
        self._sample(snapshot)
        if figures.ran and known.miss_reason is MissReason.PROMPT_DIVERGED:
            self._blame(standing.client, counting.lost_tokens(standing, known))
        session = None if place is None else place.session
        note = turn_note(
            outcome,
            standing,
            figures,
            at=self._clock().wall,
            seconds=seconds,
            number=-1 if session is None else session.serial,
        )
        self.log.note(note, session, self._text(standing, session))

    def _text(self, standing: Standing, session: Session | None) -> Text | None:
        """Who knows no salt shall not read what is under it."""
        found = standing.divergence
        if found is None or session is None or is_salted(session.tenant) or not self._gateway.shows_text:
            return None
        return Text(found.message_index, found.stored, found.received)

    def _blame(self, client: str, tokens: int) -> None:
        name = client if client in self._clients or len(self._clients) < MOST_CLIENTS else OTHERS
        self._clients[name] += tokens

    def tick(self) -> None:
        """Once a second: what the store has done since, and hints that no turn followed."""
        self._sample(self._gateway.manager.snapshot())
        if wasted := self.prefetches.take_wasted(self._clock().monotonic):
            self._minutes.add(self._minute(), {"prefetch_wasted": float(wasted)})

    def _sample(self, snapshot: Snapshot) -> None:
        totals: Totals = snapshot.totals
        seen = {name: int(getattr(totals, name)) for name in counting.STORE_TOTALS}
        fresh = {name: float(seen[name] - self._totals[name]) for name in seen if seen[name] != self._totals[name]}
        if fresh:
            self._minutes.add(self._minute(), fresh)
            self._totals = seen

    def _minute(self) -> int:
        return int((self._clock().monotonic - self._started) // MINUTE)

    # --- what it tells ------------------------------------------------------------------------

    def take(self) -> State:
        """The state of this moment, kept for a while under its `snapshot` number."""
        self.tick()
        self._census.advance()
        fresh = self._told()
        last = self._states[-1] if self._states else None
        if last is not None and all(last[name] == fresh[name] for name in fresh if name not in ALWAYS_NEW):
            return {**last, **{name: fresh[name] for name in ("at", "uptime_seconds")}}
        self._number += 1
        fresh["snapshot"] = self._number
        self._states.append(fresh)
        return fresh

    def kept(self, number: int) -> State | None:
        """The state that was told under `number`, if that is not too long ago."""
        return next((state for state in self._states if state["snapshot"] == number), None)

    def _told(self) -> State:
        gateway = self._gateway
        snapshot = gateway.manager.snapshot()
        windows = {name: self._window(name) for name in MINUTES}
        census = self._census.last
        return {
            "snapshot": 0,
            "at": round(self._clock().wall, 3),
            **state(gateway),
            "verdict": asdict(judge(self._facts(snapshot, windows["1h"]))),
            "kept": census.as_json(),
            "windows": {name: asdict(each) for name, each in windows.items()},
            "tiles": {
                name: [asdict(tile) for tile in tiles(each, self._now(snapshot, name))]
                for name, each in windows.items()
            },
            "clients": dict(self._clients.most_common()),
            "transfers_by_direction": [
                {"source": source.name.lower(), "target": target.name.lower(), **asdict(seen)}
                for (source, target), seen in sorted(gateway.traffic.items())
            ],
            "watermarks": watermarks(gateway),
            "last_turns": self.log.last(),
        }

    def series(self, name: str) -> dict[str, object]:
        """First tokens by kind and misses by reason, a point for each minute of a window or for several."""
        minute, length, step = self._minute(), MINUTES[name], STEPS[name]
        # The last point of several minutes ends with the current one.
        columns = [
            *(each for kind in counting.KINDS for each in counting.FIRST_TOKEN_BUCKETS[kind]),
            *(f"miss_{reason}" for reason in MissReason),
        ]
        found = self._minutes.series(minute, length, columns, step)
        # What was before this process is nothing; a plot of one point is none, though.
        points, now = min(length // step, max(LEAST_POINTS, minute // step + 1)), self._clock()
        end = now.unix(self._started + (minute + 1) * MINUTE)
        first: dict[str, list[float | None]] = {}
        for kind in counting.KINDS:
            buckets = [found[each][-points:] for each in counting.FIRST_TOKEN_BUCKETS[kind]]
            first[kind] = [counting.p50(counts) for counts in zip(*buckets, strict=True)]
        misses = {
            reason.value: found[f"miss_{reason}"][-points:] for reason in MissReason if reason not in counting.NO_LOSS
        }
        return {
            "window": name,
            "step_seconds": step * MINUTE,
            "at": [round(end - (points - index) * step * MINUTE) for index in range(points)],
            "first_token_p50": first,
            "misses": {reason: counts for reason, counts in misses.items() if any(counts)},
        }

    def _window(self, name: str) -> Window:
        now, seconds = self._clock(), MINUTES[name] * MINUTE
        lived = now.monotonic - self._started
        is_since_start = lived < seconds
        # Whole minutes of this process, so that it stays the same while nothing happens.
        since = now.unix(self._started) if is_since_start else now.unix(self._started + MINUTE * (self._minute() + 1))
        since = round(since if is_since_start else since - seconds)
        return window(self._minutes.sums(self._minute(), MINUTES[name]), since, is_since_start)

    def _hours(self, name: str) -> float:
        lived = (self._minute() + 1) / 60
        return min(MINUTES[name] / 60, lived)

    def _now(self, snapshot: Snapshot, name: str) -> Now:
        census, hbm = self._census.last, snapshot.tier(Tier.HBM)
        lowest = [counts for counts in snapshot.tiers if counts.capacity][-1]
        by_tier = census.sessions
        return Now(
            kept=census.kept,
            kept_by_tier=(by_tier["hbm"], by_tier["dram"], by_tier["nvme"]),
            kept_tokens=census.tokens,
            hbm_tokens=hbm.capacity * self._gateway.block_tokens,
            running=snapshot.turns.granted,
            waiting=snapshot.turns.waiting + self._gateway.queue.waiting,
            nvme_bytes_last_day=snapshot.nvme_bytes_last_day,
            nvme_rated_bytes_per_day=self._gateway.nvme_rated_bytes_per_day,
            has_nvme=self._gateway.disk is not None,
            free_blocks_below=lowest.free,
            blocks_below=lowest.capacity,
            window_hours=self._hours(name),
            worst_client=next((name for name, _ in self._clients.most_common(1)), ""),
        )

    def _facts(self, snapshot: Snapshot, hour: Window) -> Facts:
        gateway, health = self._gateway, disk_health(self._gateway)
        tiers = {counts.tier: counts for counts in snapshot.tiers}
        by_us = {reason.value: hour.lost[reason.value] for reason in counting.BY_US}
        return Facts(
            turns=hour.turns,
            turns_ever=snapshot.totals.turns_arrived,
            refused=hour.refused,
            running=snapshot.turns.granted,
            waiting=snapshot.turns.waiting,
            reused=sum(hour.reused.values()),
            recomputed=hour.recomputed,
            lost=by_us,
            lost_by_clients=hour.lost_by_clients,
            worst_client=next((name for name, _ in self._clients.most_common(1)), ""),
            wakes=hour.wakes.count,
            wake_p95_seconds=hour.wakes.p95,
            saved_seconds=hour.saved_seconds,
            sessions=len(gateway.book),
            evicted_bytes=(hour.evicted + hour.displaced) * gateway.block_bytes,
            dram=self._tier(tiers.get(Tier.DRAM)),
            nvme=self._tier(tiers.get(Tier.NVME)),
            writes_every_turn=snapshot.nvme_write_policy is WritePolicy.EVERY_TURN,
            disk_reasons=() if health is None or not health.is_degraded else health.reasons,
            is_draining=gateway.is_draining,
            max_queue=gateway.settings.max_queue,
            wake_deadline_seconds=gateway.settings.wake_deadline_seconds,
        )

    def _tier(self, counts: TierCounts | None) -> TierFacts:
        if counts is None:
            return TierFacts()
        used = counts.capacity - counts.free
        block = self._gateway.block_bytes
        return TierFacts(counts.capacity * block, used * block, counts.health is TierHealth.OFF)


def watermarks(gateway: Gateway) -> dict[str, dict[str, float]]:
    """Shares of a tier at which its coldest begin to leave, and at which they stop."""
    settings = gateway.settings
    return {
        "hbm": {"high": settings.hbm_high, "low": settings.hbm_low},
        "dram": {"high": settings.dram_high, "low": settings.dram_low},
    }
