"""What became of hints that a session will be needed (pure).

useful   its turn found everything there
late     its turn came first, and waited for some of it
wasted   no turn came while it held
"""

from __future__ import annotations

from typing import Literal

from kvstore.deadlines import Deadlines

Which = tuple[str, str, int]
"""Scope, session, branch."""

MOST_OPEN = 10_000


class Prefetches:
    """Hints that hold, by branch. `now` is on the clock of `hold_until`."""

    def __init__(self) -> None:
        self._open: Deadlines[Which] = Deadlines()

    def __len__(self) -> int:
        return len(self._open)

    def given(self, which: Which, hold_until: float) -> None:
        """A later hint for the same branch stands for both; beyond MOST_OPEN none is followed."""
        if len(self._open) < MOST_OPEN:
            self._open.set(which, hold_until)

    def withdrawn(self, which: Which) -> None:
        """Its client took it back: neither useful nor wasted."""
        self._open.discard(which)

    def turn_came(self, which: Which, trigger: str | None) -> Literal["useful", "late"] | None:
        """A turn on `which` was granted; None where no hint held, or where nothing had slept."""
        if not self._open.has(which):
            return None
        self._open.discard(which)
        return None if trigger is None else "useful" if trigger == "hint" else "late"

    def take_wasted(self, now: float) -> int:
        """How many have ended since the last call."""
        return len(self._open.take_due(now))
