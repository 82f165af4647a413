"""Hints that a session will be needed: given, remembered while they hold, withdrawn.

A hint is never an error. Too many of them are declined, so that a client that hints in a loop cannot keep the
store's transfers from the turns that are here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.events import WakeStatus
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.store import SleepingStore, Wake
    from kvstore.session import Branch, Session

HINTS_PER_SECOND = 100.0
HINTS_AT_ONCE = 400.0
"""A thousand agents, each hinting before a turn every ten seconds, are a hundred a second."""

MOST_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Hint:
    """One that was passed on; `hold_until` on the clock of whoever gave it."""

    wake: Wake
    branch: int
    hold_until: float


class Rate:
    """A token bucket: `per_second` in the long run, `most` at once."""

    def __init__(self, per_second: float, most: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._most = most
        self._clock = clock
        self._left = most
        self._at = clock()

    def take(self) -> bool:
        """Is there one more? If so it is gone."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Pace:
    """How long wakes take, from those that turns waited for: a running mean of seconds a token."""

    def __init__(self) -> None:
        self._seconds: dict[Tier, float] = {}

    def observe(self, origin: Tier, tokens: int, seconds: float) -> None:
        """A wake of `tokens` whose deepest source was `origin` took `seconds`."""
        if tokens > 0 and seconds > 0 and origin is not Tier.HBM:
            fresh = seconds / tokens
            self._seconds[origin] = 0.8 * self._seconds.get(origin, fresh) + 0.2 * fresh

    def estimate(self, origin: Tier, tokens: int) -> float | None:
        """Seconds; None until a wake from there was seen."""
        each = self._seconds.get(origin)
        return None if each is None else each * tokens


class Hints:
    """Live hints by session; the latest for a branch stands for it."""

    def __init__(self, store: SleepingStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace = Pace()
        self._store = store
        self._clock = clock
        self._rate = Rate(HINTS_PER_SECOND, HINTS_AT_ONCE, clock)
        self._live: OrderedDict[tuple[str, str, int], Hint] = OrderedDict()

    def has_room(self) -> bool:
        """May one more be given now? Asking counts."""
        return self._rate.take()

    def give(self, session: Session, branch: Branch, target: Tier, hold_seconds: float) -> Hint:
        """Ask the store to wake a branch; an earlier hint for it is replaced."""
        key = (session.tenant, session.id, branch.index)
        wake = self._store.wake(branch.block_keys, target, hold_seconds)
        # Only now: what both want stays wanted throughout, and loads under way go on.
        self._cancel(self._live.pop(key, None))
        hint = Hint(wake, branch.index, self._clock() + hold_seconds)
        if wake.status in (WakeStatus.WAKING, WakeStatus.AWAKE):
            self._live[key] = hint
            if len(self._live) > MOST_REMEMBERED:
                self._live.popitem(last=False)
        return hint

    def withdraw(self, session: Session) -> list[Hint]:
        """Cancel what was hinted for a session and still holds; says which."""
        now, withdrawn = self._clock(), []
        for branch in session.branches:
            hint = self._live.pop((session.tenant, session.id, branch), None)
            self._cancel(hint)
            if hint is not None and hint.hold_until > now:
                withdrawn.append(hint)
        return withdrawn

    def _cancel(self, hint: Hint | None) -> None:
        if hint is not None:
            hint.wake.cancel()
