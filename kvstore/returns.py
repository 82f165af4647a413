"""When a branch will be needed again, and waking it before that (pure).

Of each branch a running mean of the gaps between its turns is kept, on a logarithmic scale since
gaps span five orders of magnitude, with its mean deviation; those after a tool call apart from
those after an answer to a human. What the client expects goes before what was seen.

    recorded ----- a little before the gap is expected to end, if it then sleeps ----> woken, and
    kept until the gap is longer than nearly all were; used if its turn finds it in HBM

Only branches that have come back like clockwork are woken on suspicion. A wake takes the room that
a hint of a client would get, and fewer of them at once. Off unless `predict_returns`: what has had
time to fall asleep has mostly missed the moment at which it was expected already, so on the trace
this was judged on a third of the wakes are used (docs/decisions/015).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Final

from kvstore.deadlines import Deadlines
from kvstore.events import WakeHinted
from kvstore.rows import NO_ROW
from kvstore.types import Tier, WakeId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.config import PlannerConfig
    from kvstore.events import BranchRecorded
    from kvstore.hints import Hints
    from kvstore.store import Store
    from kvstore.types import BlockKey

NEW_SHARE: Final = 0.3
"""Of one more gap in the running means."""
LEAST_GAPS: Final = 4
MOST_DEVIATION: Final = 0.5
"""A factor of 1.6: what varies more is not waited for. With 1.0 the replay read a third more, and used no more."""
LEAST_GAP_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Gap:
    """What is known of the gaps of one kind: mean and mean deviation of their logarithms."""

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    def and_one_of(self, seconds: float) -> Gap:
        value = log(max(seconds, LEAST_GAP_SECONDS))
        if not self.count:
            return Gap(1, value, 0.0)
        share = max(NEW_SHARE, 1.0 / (self.count + 1))
        off = abs(value - self.mean)
        return Gap(
            self.count + 1, self.mean + share * (value - self.mean), self.deviation + share * (off - self.deviation)
        )


@dataclass(slots=True)
class Resting:
    """A branch between two turns."""

    since: float
    gaps: tuple[Gap, Gap]  # after an answer to a human; after a tool call
    after_tool_call: bool
    keep_until: float = 0.0  # of a wake on suspicion
    wake: WakeId | None = None


class Returns:
    """See the module."""

    def __init__(self, store: Store, hints: Hints, config: PlannerConfig) -> None:
        self._store = store
        self._hints = hints
        self._config = config
        self._resting: dict[BlockKey, Resting] = {}
        self._due: Deadlines[BlockKey] = Deadlines()
        self._num_wakes = 0

    def recorded(self, event: BranchRecorded) -> None:
        """A turn has ended, or a branch's terms have changed."""
        if not self._config.predict_returns:
            return
        before = self._forget(event.old_tip)
        if event.tip is None or event.final:
            return
        gaps = (Gap(), Gap()) if before is None else before.gaps
        now = self._store.blocks.rows.now
        self._forget(event.tip)  # of several that end in one block only the last is waited for
        self._resting[event.tip] = resting = Resting(now, gaps, event.after_tool_call)
        soonest, latest = self._expected(gaps[event.after_tool_call], event.expected_idle_seconds)
        if soonest is not None:
            self._due.set(event.tip, now + max(0.0, soonest - self._config.predict_lead_seconds))
            resting.keep_until = now + latest

    def arrived(self, keys: Sequence[BlockKey]) -> None:
        """A turn over `keys` is here."""
        if not self._resting:
            return
        for key in reversed(keys):
            if key in self._resting:
                self._note_return(key)
                return

    def run(self) -> None:
        """Wake what is due."""
        for tip in self._due.take_due(self._store.blocks.rows.now):
            self._wake(tip)

    def next_moment(self) -> float | None:
        return self._due.next()

    def _expected(self, gap: Gap, told: float | None) -> tuple[float | None, float]:
        """Seconds of idleness: the first moment at which a turn may come, and one by which it has nearly always."""
        if told is not None:
            return told, 2.0 * told + self._config.predict_lead_seconds
        if gap.count < LEAST_GAPS or gap.deviation > MOST_DEVIATION:
            return None, 0.0
        return exp(gap.mean - gap.deviation), exp(gap.mean + 3.0 * gap.deviation)

    def _note_return(self, tip: BlockKey) -> None:
        resting, row = self._resting[tip], self._store.blocks.rows.find(tip)
        human, tool = resting.gaps
        seconds = self._store.blocks.rows.now - resting.since
        if resting.after_tool_call:
            tool = tool.and_one_of(seconds)
        else:
            human = human.and_one_of(seconds)
        resting.gaps = human, tool
        self._due.discard(tip)
        if resting.wake is not None:
            is_there = row != NO_ROW and self._store.blocks.hbm.is_present(row)
            self._store.blocks.totals.predictions_used += is_there
            self._hints.take_over(resting.wake)
            resting.wake = None

    def _wake(self, tip: BlockKey) -> None:
        blocks = self._store.blocks
        row = blocks.rows.find(tip)
        if row == NO_ROW or blocks.hbm.is_present(row) or not blocks.can_come(row):
            return
        if len(self._hints) >= self._config.max_hints // 2:
            return
        keys = []
        while row != NO_ROW:
            keys.append(blocks.rows.key(row))
            row = blocks.rows.parent[row]
        self._num_wakes += 1
        wake = WakeId(-self._num_wakes)
        hold = max(self._config.predict_lead_seconds, self._resting[tip].keep_until - blocks.rows.now)
        if self._hints.add(WakeHinted(wake, tuple(reversed(keys)), Tier.HBM, hold)):
            self._resting[tip].wake = wake
            blocks.totals.predictions += 1

    def _forget(self, tip: BlockKey | None) -> Resting | None:
        if tip is None:
            return None
        self._due.discard(tip)
        resting = self._resting.pop(tip, None)
        if resting is not None and resting.wake is not None:
            self._hints.cancel(resting.wake)
        return resting

    def closed(self, tips: Sequence[BlockKey]) -> None:
        """These branches are gone."""
        for tip in tips:
            self._forget(tip)
