"""Which turns there are, and in which state (pure).

queue      WAITING, by urgency
admitted   WAKING, RUNNING and STOPPING: those that hold slots of HBM
waking     of those, the WAKING ones
growing    of those, the RUNNING ones that have asked for more slots

Priorities are a tenant's own: between tenants whoever has fewest turns admitted is first.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from kvstore.snapshot import TurnCounts
from kvstore.turns import Turn, TurnQueue, TurnState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.config import PlannerConfig
    from kvstore.events import TurnArrived
    from kvstore.tenancy import Tenancy
    from kvstore.types import TurnId


class Roster:
    """Turns from their arrival until they are forgotten."""

    def __init__(self, config: PlannerConfig, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self.queue = TurnQueue()
        self.turns: dict[TurnId, Turn] = {}
        self.admitted: dict[TurnId, Turn] = {}
        self.waking: dict[TurnId, Turn] = {}
        self.growing: dict[TurnId, Turn] = {}
        self._max_admitted = config.max_running
        self._next_seq = 0

    def arrive(self, event: TurnArrived, tenant: int, now: float) -> Turn:
        """A new turn of `tenant`, queued."""
        assert event.turn not in self.turns, f"turn {event.turn} arrived twice"
        turn = Turn(
            id=event.turn,
            tenant=tenant,
            seq=self._next_seq,
            priority=event.priority,
            cache=event.cache,
            keys=list(event.keys) if event.cache else [],
            tokens=event.prompt_tokens,
            most_tokens=event.prompt_tokens + event.output_tokens,
            queued_at=now,
            to_nvme=event.to_nvme and event.cache,
        )
        self._next_seq += 1
        self.turns[turn.id] = turn
        self.queue.add(turn)
        self._tenancy.begin_use(tenant)
        return turn

    def admit(self, turn: Turn) -> None:
        """WAITING -> WAKING."""
        self.queue.remove(turn)
        turn.state = TurnState.WAKING
        self.admitted[turn.id] = self.waking[turn.id] = turn

    def run(self, turn: Turn) -> None:
        """WAKING -> RUNNING."""
        turn.wake, turn.state, turn.suspended = None, TurnState.RUNNING, False
        del self.waking[turn.id]

    def unadmit(self, turn: Turn) -> None:
        """WAKING -> WAITING, as old as it was."""
        turn.wake, turn.state = None, TurnState.WAITING
        del self.admitted[turn.id], self.waking[turn.id]
        self.queue.add(turn)

    def want(self, turn: Turn, slots: int) -> None:
        """A RUNNING turn asks for `slots` more."""
        turn.wanted = slots
        self.growing[turn.id] = turn

    def settle(self, turn: Turn) -> None:
        """It asks for nothing any more."""
        turn.wanted = 0
        self.growing.pop(turn.id, None)

    def stop(self, turn: Turn) -> None:
        """RUNNING -> STOPPING."""
        self.settle(turn)
        turn.state = TurnState.STOPPING

    def suspend(self, turn: Turn, now: float) -> None:
        """It has stopped and comes back: WAITING, in its old place."""
        self.settle(turn)
        del self.admitted[turn.id]
        turn.state, turn.suspended, turn.queued_at = TurnState.WAITING, True, now
        turn.may_load, turn.miss = True, None
        self.queue.add(turn)

    def forget(self, turn: Turn) -> None:
        """It is over."""
        if turn.state is TurnState.WAITING:
            self.queue.remove(turn)
        else:
            self.settle(turn)
            del self.admitted[turn.id]
        del self.turns[turn.id]
        self._tenancy.end_use(turn.tenant)

    @property
    def has_room(self) -> bool:
        """May one more turn be admitted?"""
        return len(self.admitted) < self._max_admitted

    def waiters(self) -> Iterator[Turn]:
        """Waiting turns, the most urgent first; some of them may be admitted while this runs.

        Who has its part admitted is left out while anyone waits in vain who has not.
        """
        if not self._tenancy.is_shared or not len(self.queue):
            yield from list(self.queue)
            return
        lanes: dict[int, deque[Turn]] = {}
        for turn in self.queue:
            lanes.setdefault(turn.tenant, deque()).append(turn)
        admitted, part, is_owed = self.admitted_by_tenant(), self._part(), False
        while lanes:
            tenant = min(lanes, key=lambda tenant: (admitted[tenant], lanes[tenant][0].seq))
            if is_owed and admitted[tenant] >= part:
                return
            turn = lanes[tenant].popleft()
            if not lanes[tenant]:
                del lanes[tenant]
            yield turn
            if turn.state is TurnState.WAITING:
                is_owed = is_owed or admitted[tenant] < part
            else:
                admitted[tenant] += 1

    def admitted_by_tenant(self) -> Counter[int]:
        """How many turns each tenant has admitted."""
        return Counter(turn.tenant for turn in self.admitted.values())

    def having_their_part(self) -> set[int]:
        """Tenants that have their part of the turns that may run, while another waits that has less."""
        if not self._tenancy.is_shared or not len(self.queue):
            return set()
        admitted, part = self.admitted_by_tenant(), self._part()
        is_owed = any(admitted[turn.tenant] < part for turn in self.queue)
        return {tenant for tenant, turns in admitted.items() if turns >= part} if is_owed else set()

    def _part(self) -> int:
        """Turns of each tenant that has any, if all of them want as many."""
        return -(-self._max_admitted // max(1, len({turn.tenant for turn in self.turns.values()})))

    def is_first(self, turn: Turn) -> bool:
        """Does no turn of its tenant go on that was admitted, or if it was itself, that arrived before it?"""
        least = -1 if turn.state is TurnState.WAITING else turn.seq
        own = (other for other in self.admitted.values() if other.tenant == turn.tenant)
        return not any(least < 0 or other.seq < least for other in own if other.state is not TurnState.STOPPING)

    def oldest(self) -> Turn | None:
        """The admitted turn that arrived first, of those that go on; it is never suspended."""
        going_on = (turn for turn in self.admitted.values() if turn.state is not TurnState.STOPPING)
        return min(going_on, key=lambda turn: turn.seq, default=None)

    def needy(self) -> list[Turn]:
        """Admitted turns that may lack slots, the most urgent first."""
        return sorted((*self.growing.values(), *self.waking.values()), key=lambda turn: turn.order)

    def next_deadline(self) -> float | None:
        """When the first of the WAKING turns stops waiting for its blocks."""
        wakes = (turn.wake for turn in self.waking.values() if turn.wake is not None and turn.wake.is_waiting)
        return min((wake.deadline for wake in wakes), default=None)

    def num_new_waiters(self) -> int:
        """Waiting turns that have not run yet."""
        return sum(not turn.suspended for turn in self.queue)

    def counts(self) -> TurnCounts:
        new = self.num_new_waiters()
        return TurnCounts(
            waiting=new,
            suspended=len(self.queue) - new,
            granted=len(self.admitted),
            waking=len(self.waking),
            stopping=sum(turn.state is TurnState.STOPPING for turn in self.admitted.values()),
        )

    def check(self) -> None:
        """Raise AssertionError unless every turn is in exactly one place, and that fits its state."""
        waiting, admitted = list(self.queue), list(self.admitted.values())
        assert {turn.id for turn in (*waiting, *admitted)} == self.turns.keys(), "a turn is lost"
        assert len(waiting) + len(admitted) == len(self.turns), "a turn both waits and runs"
        assert len(admitted) <= self._max_admitted, "more turns run than may"
        for turn in waiting:
            assert turn.state is TurnState.WAITING, f"queued turn {turn.id} is {turn.state.value}"
            assert turn.holds_nothing, f"queued turn {turn.id} holds slots or pins"
        for turn in admitted:
            assert turn.state is not TurnState.WAITING, f"admitted turn {turn.id} is waiting"
            assert (turn.wake is not None) == (turn.state is TurnState.WAKING), f"turn {turn.id} has a wake, or none"
        waking = {turn.id for turn in admitted if turn.state is TurnState.WAKING}
        assert self.waking.keys() == waking, f"waking turns are {waking}"
        growing = {turn.id for turn in admitted if turn.wanted}
        assert self.growing.keys() == growing, f"growing turns are {growing}"
