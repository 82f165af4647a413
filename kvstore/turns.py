"""Turns as the planner sees them, and the queue they wait in (pure).

A turn's block table is `[0, num_blocks)`. Index `i` is either in `open` (a slot only this
turn can see: still being written, or a duplicate of a block that another turn published
first) or it is the slot of the turn's row at depth `i`. The rows are the chain that ends in
`tip`, which is pinned while the turn runs.

    WAITING   queued, new or suspended earlier; holds nothing but its tail in DRAM
    WAKING    admitted: holds what its wake holds, until all of it is there
    RUNNING   granted
    STOPPING  granted, told to stop; its slots are safe only when StepEnded says so
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.rows import NO_ROW

if TYPE_CHECKING:
    from kvstore.events import Miss
    from kvstore.tails import Tail
    from kvstore.types import BlockKey, TurnId
    from kvstore.wakes import Wake


class TurnState(Enum):
    WAITING = "waiting"
    WAKING = "waking"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class Turn:
    """One turn from its arrival to its last StepEnded."""

    id: TurnId
    tenant: int
    seq: int  # arrival order; kept through suspensions
    priority: int
    cache: bool
    keys: list[BlockKey]  # of the blocks of tokens[0, tokens - 1) that may be looked up
    tokens: int  # prompt, and output as of the last suspension
    most_tokens: int  # prompt + output at its longest
    queued_at: float
    state: TurnState = TurnState.WAITING
    suspended: bool = False  # it ran before and waits to go on
    cancelled: bool = False
    tip: int = NO_ROW
    num_blocks: int = 0
    open: dict[int, int] = field(default_factory=dict)
    wanted: int = 0  # slots asked for by GrowWanted and not yet granted
    wake: Wake | None = None  # while WAKING
    tail: Tail | None = None  # while WAITING to go on
    to_nvme: bool = False  # may its blocks lie on NVMe while it is suspended, and before it is settled?
    rests_at: BlockKey | None = None  # they may, up to this one, since it was suspended or ended
    may_load: bool = True  # False once a load failed or came late for it: it computes instead
    miss: Miss | None = None  # why it has to compute what was stored
    has_waited: bool = False  # there was no room for it when it arrived
    woken_from_queue: bool = False  # loads of its blocks began while it waited, or when it was admitted after that

    @property
    def order(self) -> tuple[int, int]:
        """Urgency: lower is sooner."""
        return self.priority, self.seq

    @property
    def lacking(self) -> int:
        """HBM slots it waits for."""
        return self.wanted if self.wake is None else self.wake.lacking

    @property
    def holds_nothing(self) -> bool:
        """No slot of HBM and no pin."""
        return self.tip == NO_ROW and self.wake is None and not self.open and not self.wanted

    def note_key(self, index: int, key: BlockKey) -> None:
        """Block `index` of this turn was filled with `key`: after a suspension it can be looked up."""
        if index < len(self.keys):
            self.keys[index] = key
        elif index == len(self.keys):
            self.keys.append(key)


class TurnQueue:
    """Waiting turns by (priority, arrival)."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    def add(self, turn: Turn) -> None:
        insort(self._turns, turn, key=_order)

    def remove(self, turn: Turn) -> None:
        position = bisect_left(self._turns, turn.order, key=_order)
        assert self._turns[position] is turn, f"turn {turn.id} is not queued"
        del self._turns[position]

    def aged(self, now: float, age_limit_seconds: float) -> list[Turn]:
        """Turns that have waited `age_limit_seconds` or longer, the first arrival first."""
        return sorted((turn for turn in self._turns if turn.queued_at + age_limit_seconds <= now), key=_arrival)

    def next_aging(self, now: float, age_limit_seconds: float) -> float | None:
        """When the next turn will have waited `age_limit_seconds`; None when no turn is younger than that."""
        moments = (turn.queued_at + age_limit_seconds for turn in self._turns)
        return min((moment for moment in moments if moment > now), default=None)


def _order(turn: Turn) -> tuple[int, int]:
    return turn.order


def _arrival(turn: Turn) -> int:
    return turn.seq
