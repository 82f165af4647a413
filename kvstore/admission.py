"""Who gets slots of HBM, in which order, and who gives way (pure).

- Who holds slots and wants more comes before the queue, the more urgent first; while one of
  them has to be helped by a suspension nobody else takes slots, or what is taken from the
  suspended turn would go to the wrong one.
- A waiter that does not fit blocks nobody, until it is older than `age_limit_seconds`: then no
  younger turn is admitted before it, and younger ones no more urgent give way to it. A turn
  that was suspended holds back the less urgent from the start: they would take what it had.
- Only older turns suspend younger ones, so two turns never suspend each other in turn; the
  oldest admitted turn is never suspended, so something always advances.
- Nothing is evicted for a turn unless evicting is enough: `free + evictable` is exact.
- Where several tenants share the store, a turn finds room within the share of its tenant (shares.py), and makes turns
  of others give way only where those use more than both their share and its tenant. Only the first turn that a tenant
  has admitted may go beyond, and only if it could not run otherwise: so whoever asks for more than its share at once
  still gets it, one turn at a time. A turn that is old holds back its own tenant's alone while that uses its share.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvstore.events import GrantSlots, Miss, RefuseGrowth, SuspendTurn
from kvstore.rows import NO_ROW
from kvstore.turns import Turn, TurnState
from kvstore.wakes import Wake, plan_worth_restoring

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.config import PlannerConfig
    from kvstore.events import Action
    from kvstore.hints import Hints
    from kvstore.lookahead import LookAhead
    from kvstore.roster import Roster
    from kvstore.store import Store
    from kvstore.tables import Tables
    from kvstore.tails import Tail


class Help(Enum):
    """What can be done for a turn that lacks slots when evicting is not enough."""

    NOW = "now"  # slots came free at once
    COMING = "coming"  # some turns will stop
    NONE = "none"


class Admission:
    """Admits, supplies, grants and suspends turns."""

    def __init__(
        self,
        config: PlannerConfig,
        store: Store,
        roster: Roster,
        tables: Tables,
        hints: Hints,
        look_ahead: LookAhead,
        emit: Callable[[Action], None],
    ) -> None:
        self._config = config
        self._store = store
        self._blocks = store.blocks
        self._hbm = store.blocks.hbm
        self._roster = roster
        self._tables = tables
        self._hints = hints
        self._look_ahead = look_ahead
        self._emit = emit

    def run(self) -> None:
        """Give out what there is, and see to it that more comes where that is possible."""
        self._advance_wakes()
        has_news = True
        while has_news:
            self._count_opened()
            owed, may_admit = self._supply_all()
            if may_admit:
                self._admit(owed)
            has_news = may_admit and self._hints.advance()
        if owed or (self._roster.queue and self._roster.has_room):
            self._store.traffic.hurry()
        self._look_ahead.run(may_take=may_admit and not owed)

    def _room(self, turn: Turn, owed: int) -> int:
        """Slots of HBM that are free or can be had for `turn` by evicting, beyond those owed."""
        return self._store.room.available(turn.tenant) - owed

    def _room_beyond_share(self, owed: int) -> int:
        return self._store.room.available_beyond_share() - owed

    def _room_to_admit(self, turn: Turn, owed: int) -> int:
        """As `_room`; for the first turn of its tenant, whatever there is."""
        if self._roster.is_first(turn):
            return self._room_beyond_share(owed)
        return self._room(turn, owed)

    def _count_opened(self) -> None:
        """Slots that turns and hints write to, or wait with, count as used by their tenants."""
        if not self._blocks.rows.tenancy.is_shared:
            return
        opened = self._hbm.shares.opened
        opened[:] = [0] * len(opened)
        for turn in self._roster.admitted.values():
            opened[turn.tenant] += len(turn.open) + (0 if turn.wake is None else len(turn.wake.reserve))
        for hint in self._hints:
            opened[hint.tenant] += len(hint.wake.reserve)

    def refuse_growth(self, turn: Turn) -> None:
        """It holds all that there is."""
        self._roster.settle(turn)
        self._blocks.totals.growths_refused += 1
        self._emit(RefuseGrowth(turn.id))

    def unadmit(self, turn: Turn) -> None:
        """Take back what a WAKING turn holds."""
        assert turn.wake is not None
        if turn.wake.tip != NO_ROW:
            self._blocks.cleaner.rest(turn.wake.tip)
        turn.tail = turn.wake.release_tail()
        turn.wake.end()
        self._roster.unadmit(turn)

    # --- those that hold slots --------------------------------------------------------

    def _advance_wakes(self) -> None:
        """Protect what has arrived, before anything is evicted; give up what is past its deadline."""
        self._hints.observe()
        now = self._blocks.rows.now
        for turn in self._roster.waking.values():
            assert turn.wake is not None
            turn.wake.advance()
            if turn.wake.deadline <= now and turn.wake.is_waiting:
                turn.wake.give_up()
            turn.may_load = turn.may_load and not turn.wake.has_failed
            turn.miss = turn.wake.miss if turn.wake.has_failed else turn.miss

    def _supply_all(self) -> tuple[int, bool]:
        """Serve who holds slots and wants more: slots owed to them, and whether anyone may be admitted beside them."""
        owed, may_take = 0, True
        for turn in self._roster.needy():
            if turn.state is TurnState.WAITING or turn.state is TurnState.STOPPING:
                continue  # it was made to give way meanwhile
            if may_take:
                lacking = self._supply(turn, owed)
                if lacking > self._room(turn, owed):
                    may_take = self._press(turn, lacking, owed)
                owed += max(0, turn.lacking)
            self._start_or_grant(turn)
        return owed, may_take

    def _supply(self, turn: Turn, owed: int, beyond_share: bool = False) -> int:
        """Give `turn` what is free beyond `owed`, and see to it that more comes; slots it still lacks."""
        lacking = turn.lacking
        if lacking <= 0:
            return 0
        count = min(lacking, self._store.room.obtain(owed + lacking, turn.tenant, beyond_share) - owed)
        if count <= 0:
            return lacking
        slots = self._hbm.open(count)
        if turn.wake is not None:
            turn.wake.take(slots)
            return lacking - count
        self._roster.settle(turn)  # a wish is settled with what is there
        self._emit(GrantSlots(turn.id, self._tables.append(turn, slots)))
        return 0

    def _press(self, turn: Turn, lacking: int, owed: int) -> bool:
        """Evicting is not enough for `turn`. True when it was helped at once; else someone, perhaps itself, stops."""
        while (help_ := self._make_way(turn, lacking - max(0, self._room(turn, owed)))) is Help.NOW:
            lacking = self._supply(turn, owed)
            if lacking <= self._room(turn, owed):
                return True
        if help_ is Help.NONE and self._blocks.rows.tenancy.is_shared and self._roster.is_first(turn):
            help_ = self._make_way_beyond_share(turn, owed)
        if help_ is not Help.NONE:
            return help_ is Help.NOW
        if turn is not self._roster.oldest():
            if turn.state is TurnState.WAKING:
                self.unadmit(turn)
            else:
                self._suspend(turn)
            return False
        if turn.wake is not None or self._store.traffic.is_copying_hbm():
            return False  # copies under way, late ones among them, hold what it lacks
        self._tables.give_up_duplicates(turn)
        if self._supply(turn, owed, beyond_share=True):
            self.refuse_growth(turn)
        return True

    def _start_or_grant(self, turn: Turn) -> None:
        if turn.wake is None:
            return
        turn.wake.start()
        if turn.wake.is_ready:
            self._grant(turn, turn.wake)

    def _grant(self, turn: Turn, wake: Wake) -> None:
        totals = self._blocks.totals
        totals.turns_resumed += turn.suspended
        totals.turns_granted += not turn.suspended
        totals.reused += len(wake.rows)
        self._emit(self._tables.take_over(turn, wake))
        self._roster.run(turn)

    # --- the queue --------------------------------------------------------------------

    def _admit(self, owed: int) -> None:
        held_back_from: int | None = None
        waiting: dict[int, int] = {}  # tenants of which an old turn waits, and no younger one is admitted before it
        having_part = self._roster.having_their_part()
        for turn in self._roster.queue.aged(self._blocks.rows.now, self._config.age_limit_seconds):
            if not self._roster.has_room:
                return
            if self._is_settling(turn) or turn.tenant in waiting or turn.tenant in having_part:
                continue
            if self._try_admit(turn, owed) or self._admit_by_force(turn, owed):
                owed += max(0, turn.lacking)
                having_part = self._roster.having_their_part()
            elif self._uses_its_share(turn):
                waiting[turn.tenant] = turn.seq
            else:
                held_back_from = turn.seq
                break
        for turn in self._roster.waiters():
            if not self._roster.has_room:
                return
            if held_back_from is not None and turn.seq > held_back_from:
                continue
            if turn.tenant in waiting and turn.seq > waiting[turn.tenant]:
                continue
            if not self._is_settling(turn) and self._admit_over_hints(turn, owed):
                owed += max(0, turn.lacking)
            elif turn.suspended:
                waiting[turn.tenant] = -1  # what was taken from it must not go to a turn less urgent than it

    def _uses_its_share(self, turn: Turn) -> bool:
        """Is it for what its own tenant uses, and not for what others do, that it has to wait?"""
        return self._blocks.rows.tenancy.is_shared and self._hbm.shares.excess(turn.tenant) >= 0

    def _admit_over_hints(self, turn: Turn, owed: int) -> bool:
        """Admit `turn` if there is room, what hints hold included."""
        while not self._try_admit(turn, owed):
            may_give_way = self._may_give_way(turn)
            held = self._hints.num_held(may_give_way) if len(self._hints) else 0
            if not held or held < self._shortfall(turn, self._plan(turn)[0], owed):
                return False
            self._hints.give_way(may_give_way)
        return True

    def _try_admit(self, turn: Turn, owed: int) -> bool:
        """Admit `turn` if there is room, perhaps after evictions, beyond what is `owed`; else change nothing."""
        wanted = self._blocks_wanted(turn)
        if wanted - len(turn.keys) > self._room_to_admit(turn, owed):
            return False  # not even if all of it were in HBM: spares the look-up
        rows, miss = self._plan(turn)
        if self._shortfall(turn, rows, owed) > 0:
            return False
        self._blocks.totals.recomputes_cheaper += miss is Miss.RECOMPUTE_CHEAPER
        self._roster.admit(turn)
        turn.wake = Wake(
            store=self._store,
            rows=rows,
            num_slots=wanted,
            deadline=self._blocks.rows.now + self._config.wake_deadline_seconds,
            tail=self._fitting_tail(turn, rows),
            miss=turn.miss or miss,
        )
        turn.wake.begin()
        turn.woken_from_queue = turn.woken_from_queue or (turn.has_waited and turn.wake.is_waiting)
        if turn.wake.tip != NO_ROW:
            self._blocks.cleaner.wake(turn.wake.tip)
        if self._supply(turn, owed) > self._room(turn, owed):
            self._supply(turn, owed, beyond_share=True)
        self._start_or_grant(turn)
        self._count_opened()
        return True

    def _admit_by_force(self, turn: Turn, owed: int) -> bool:
        """Admit an aged `turn` if room can be made at once; else make it, if that is possible."""
        rows, _ = self._plan(turn)
        while self._make_way(turn, self._shortfall(turn, rows, owed)) is Help.NOW:
            if self._try_admit(turn, owed):
                return True
        return False

    def _plan(self, turn: Turn) -> tuple[list[int], Miss | None]:
        return plan_worth_restoring(self._blocks, turn.keys, turn.may_load)

    def _shortfall(self, turn: Turn, rows: list[int], owed: int) -> int:
        """Slots that `turn` lacks to be admitted with `rows`; protecting those in HBM makes them unevictable."""
        is_present, is_valid = self._hbm.is_present, self._hbm.is_valid
        present = sum(map(is_present, rows))
        tip = next((row for row in reversed(rows[:present]) if is_valid(row)), NO_ROW)
        return self._blocks_wanted(turn) - present - (self._room_to_admit(turn, owed) - self._hbm.num_unheld(tip))

    def _blocks_wanted(self, turn: Turn) -> int:
        """Blocks for its tokens so far and the next slice of output; never more than there are."""
        tokens = min(turn.most_tokens, turn.tokens + self._config.output_slice_tokens)
        return min(self._config.blocks_for(tokens), self._hbm.capacity)

    def _is_settling(self, turn: Turn) -> bool:
        """Is its tail still on its way down?"""
        if turn.tail is not None and turn.tail.is_lost:
            turn.tail = None
        return turn.tail is not None and turn.tail.num_pending > 0

    def _fitting_tail(self, turn: Turn, rows: list[int]) -> Tail | None:
        """Its tail, if what comes before it is all there."""
        tail, turn.tail = turn.tail, None
        if tail is None or (len(rows) == tail.first_index and tail.is_away):
            return tail
        self._store.tails.forget(tail)
        return None

    # --- giving way -------------------------------------------------------------------

    def _make_way(self, wanter: Turn, count: int, beyond_share: bool = False) -> Help:
        """See to it that `count` more slots come: from hints, and from the least urgent turns younger than `wanter`.

        `beyond_share`, whosever they are.
        """
        if self._hints.give_way((lambda _: True) if beyond_share else self._may_give_way(wanter)):
            return Help.NOW
        admitted = self._roster.admitted.values()
        coming = sum(self._gain(turn) for turn in admitted if turn.state is TurnState.STOPPING)
        victims = []
        for turn in sorted(admitted, key=self._expendability, reverse=True):
            if coming >= count:
                break
            if self._may_suspend(turn, wanter, beyond_share):
                victims.append(turn)
                coming += self._gain(turn)
        if wanter.state is TurnState.WAITING and coming < count:
            return Help.NONE  # suspending would not be enough to admit it: let the others finish
        for turn in victims:
            if turn.state is TurnState.WAKING:
                self.unadmit(turn)
                return Help.NOW
            self._suspend(turn)
        return Help.COMING if coming > 0 else Help.NONE

    def _make_way_beyond_share(self, wanter: Turn, owed: int) -> Help:
        """As `_make_way`, for a turn that cannot go on otherwise: at the cost of others' idle blocks, and where it is
        the oldest of all of their turns."""
        lacking = self._supply(wanter, owed, beyond_share=True)
        while lacking > (room := self._room_beyond_share(owed)):
            help_ = self._make_way(wanter, lacking - max(0, room), beyond_share=wanter is self._roster.oldest())
            if help_ is not Help.NOW:
                return help_
            lacking = self._supply(wanter, owed, beyond_share=True)
        return Help.NOW

    def _may_suspend(self, turn: Turn, wanter: Turn, beyond_share: bool) -> bool:
        if turn.state is TurnState.STOPPING or turn.seq <= wanter.seq or turn is self._roster.oldest():
            return False
        if turn.tenant != wanter.tenant:
            return beyond_share or self._has_too_much(turn.tenant, wanter.tenant)
        return wanter.state is not TurnState.WAITING or turn.priority >= wanter.priority

    def _may_give_way(self, wanter: Turn) -> Callable[[int], bool]:
        """Whose hints may end for `wanter`, by tenant."""
        return lambda tenant: tenant == wanter.tenant or self._has_too_much(tenant, wanter.tenant)

    def _has_too_much(self, tenant: int, wanter: int) -> bool:
        """Does `tenant` use more than its share, and than `wanter` does?"""
        shares = self._hbm.shares
        return shares.excess(tenant) > 0 and shares.used(tenant) > shares.used(wanter)

    def _expendability(self, turn: Turn) -> tuple[int, tuple[int, int]]:
        """Who gives way last: turns of tenants that use less, and of those the more urgent."""
        used = self._hbm.shares.used(turn.tenant) if self._blocks.rows.tenancy.is_shared else 0
        return used, turn.order

    def _gain(self, turn: Turn) -> int:
        """Slots that the end of `turn` would free or make evictable."""
        if turn.wake is not None:
            return len(turn.wake.reserve) + self._hbm.num_held_alone(turn.wake.tip)
        return len(turn.open) + self._hbm.num_held_alone(turn.tip)

    def _suspend(self, turn: Turn) -> None:
        self._blocks.totals.turns_suspended += 1
        self._roster.stop(turn)
        self._emit(SuspendTurn(turn.id))
