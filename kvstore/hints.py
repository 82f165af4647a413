"""Hints: chains to be brought up before their turn comes (pure).

A hint takes what room there is, cold blocks' included, and never makes a turn wait: whoever
lacks slots takes them from the youngest hint first. What it has brought is worth keeping
for a while, softly. It never errs: what cannot be done is declined. Hints with negative ids are
the planner's own (returns.py), and nobody is told what becomes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.events import AnswerWake, Miss, WakeStatus
from kvstore.policy import Kind
from kvstore.rows import NO_ROW
from kvstore.types import Tier
from kvstore.wakes import Wake, plan_worth_restoring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.config import PlannerConfig
    from kvstore.events import Action, WakeHinted
    from kvstore.store import Store
    from kvstore.types import WakeId


@dataclass(slots=True, eq=False)
class Hint:
    """One hint whose blocks are on their way."""

    id: WakeId
    tenant: int
    wake: Wake
    hold_seconds: float
    origin: Tier


class Hints:
    """Hints being carried out; a settled one is forgotten."""

    def __init__(self, store: Store, config: PlannerConfig, emit: Callable[[Action], None]) -> None:
        self._store = store
        self._config = config
        self._emit = emit
        self._hints: dict[WakeId, Hint] = {}

    def __len__(self) -> int:
        return len(self._hints)

    def __iter__(self) -> Iterator[Hint]:
        return iter(self._hints.values())

    def add(self, event: WakeHinted) -> bool:
        """Begin, or decline at once. True if it has begun."""
        store = self._store
        store.blocks.totals.hints += event.wake >= 0
        rows, miss = plan_worth_restoring(store.blocks, event.keys, may_load=True)
        if miss is Miss.RECOMPUTE_CHEAPER and (not rows or store.blocks.hbm.is_present(rows[-1])):
            return self._decline(event.wake, WakeStatus.RECOMPUTE_CHEAPER)
        if not rows:
            return self._decline(event.wake, WakeStatus.NOT_STORED)
        tenant = store.blocks.rows.tenant[rows[0]]
        to_hbm = event.target is Tier.HBM or len(store.blocks.pools) == 1
        hint = Hint(
            id=event.wake,
            tenant=tenant,
            wake=Wake(
                store=store,
                rows=rows,
                num_slots=len(rows) if to_hbm else 0,
                deadline=store.blocks.rows.now + self._config.wake_deadline_seconds,
                target=Tier.HBM if to_hbm else Tier.DRAM,
            ),
            hold_seconds=event.hold_seconds,
            origin=Tier(max(self._tier_of(row) for row in rows)),
        )
        has_room = not to_hbm or self._missing(rows) <= store.room.available(tenant)
        if not has_room or len(self._hints) >= self._config.max_hints:
            return self._decline(event.wake, WakeStatus.NO_ROOM)
        self._hints[event.wake] = hint
        hint.wake.begin()
        if not hint.wake.is_ready:
            self._answer(hint, WakeStatus.WAKING, len(rows))
        return True

    def observe(self) -> None:
        """Protect what has arrived, before anything is evicted."""
        for hint in self._hints.values():
            hint.wake.advance()

    def advance(self) -> bool:
        """Start what can start, and settle what is done; True if that has made room."""
        before = len(self._hints)
        for hint in list(self._hints.values()):
            wake = hint.wake
            if wake.deadline <= self._store.blocks.rows.now:
                wake.give_up()
            if (lacking := wake.lacking) > 0 and wake.target is Tier.HBM:
                wake.take(self._store.blocks.hbm.open(self._store.room.obtain(lacking, hint.tenant)))
            wake.start()
            if wake.is_ready:
                self._settle(hint, WakeStatus.AWAKE)
        return len(self._hints) < before

    def cancel(self, wake: WakeId) -> None:
        if wake in self._hints:
            self._settle(self._hints[wake], WakeStatus.CANCELLED)

    def take_over(self, wake: WakeId) -> None:
        """The turn it announced is here: it brings up the rest itself, as far as its prompt goes."""
        if wake in self._hints:
            self._settle(self._hints[wake], WakeStatus.AWAKE)

    def give_way(self, may_give_way: Callable[[int], bool]) -> bool:
        """End the youngest hint that holds slots and whose tenant `may_give_way`; True if there was one."""
        for hint in reversed(list(self._hints.values())):
            if (hint.wake.reserve or hint.wake.num_ready) and may_give_way(hint.tenant):
                self._settle(hint, WakeStatus.NO_ROOM)
                return True
        return False

    def num_held(self, may_give_way: Callable[[int], bool]) -> int:
        """Slots of HBM that hints of tenants that `may_give_way` would give up at once."""
        held_alone = self._store.blocks.hbm.num_held_alone
        hints = [hint.wake for hint in self._hints.values() if may_give_way(hint.tenant)]
        return sum(len(wake.reserve) + held_alone(wake.tip) for wake in hints)

    def rows(self) -> set[int]:
        """Rows that a hint waits for."""
        return {row for hint in self._hints.values() for row in hint.wake.rows}

    def next_deadline(self) -> float | None:
        return min((hint.wake.deadline for hint in self._hints.values()), default=None)

    def _settle(self, hint: Hint, status: WakeStatus) -> None:
        wake, rows = hint.wake, self._store.blocks.rows
        del self._hints[hint.id]
        ready = len(wake.rows) if wake.target is Tier.DRAM and wake.is_ready else wake.num_ready
        if ready:
            tip = wake.rows[ready - 1]
            rows.touch(tip, Kind.KEPT, rows.now + hint.hold_seconds)
        self._store.blocks.totals.hints_declined += status is not WakeStatus.AWAKE and hint.id >= 0
        wake.end()
        self._answer(hint, status, ready)

    def _answer(self, hint: Hint, status: WakeStatus, num_blocks: int) -> None:
        if hint.id >= 0:
            self._emit(AnswerWake(hint.id, status, num_blocks * self._config.block_tokens, hint.origin))

    def _decline(self, wake: WakeId, status: WakeStatus) -> bool:
        if wake >= 0:
            self._store.blocks.totals.hints_declined += 1
            self._emit(AnswerWake(wake, status, 0, Tier.HBM))
        return False

    def _missing(self, rows: Sequence[int]) -> int:
        """Slots it takes: those of missing blocks, and those that protecting the rest makes unevictable."""
        present = [row for row in rows if self._store.blocks.hbm.is_present(row)]
        tip = next((row for row in reversed(present) if self._store.blocks.hbm.is_valid(row)), NO_ROW)
        return len(rows) - len(present) + self._store.blocks.hbm.num_unheld(tip)

    def _tier_of(self, row: int) -> Tier:
        if self._store.blocks.hbm.is_valid(row):
            return Tier(self._store.blocks.rows.origin[row])
        return self._store.blocks.source_of(row) or Tier.HBM
