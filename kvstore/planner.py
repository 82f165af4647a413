"""The whole store as one state machine: (event, now) -> actions (pure).

It owns residency: who is granted, who waits, who is suspended, which blocks stay. It holds
no lock, does no IO and reads no clock. `_pump` is the only place that admits, evicts,
loads, suspends and grants; events only record what happened.

Rules, and why:

- A turn is admitted with the longest prefix that is somewhere, and slots for the rest of its
  prompt and a first slice of output. It is granted in the call that finds all of it in HBM, so
  that no eviction in between can see an idle prefix (httpcore #1110).
- Nothing is evicted for a turn unless evicting is enough: `free + evictable` is exact.
- Who holds slots and wants more comes before the queue, the more urgent first; while one of
  them has to be helped by a suspension nobody else takes slots, or what is taken from the
  suspended turn would go to the wrong one.
- Only older turns suspend younger ones, so two turns never suspend each other in turn; the
  oldest running turn is never suspended, so something always advances.
- The slots of a turn that was told to stop are touched only after StepEnded said it stopped.
- Progress never waits for a lower tier: what that does not take, or not in time, is dropped
  and computed again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, assert_never

from kvstore import laws
from kvstore.branches import Branches
from kvstore.config import PlannerConfig
from kvstore.events import (
    Action,
    BranchRecorded,
    Event,
    Fill,
    FlushWanted,
    GrantSlots,
    GrantTurn,
    GrowWanted,
    Refusal,
    RefuseGrowth,
    RefuseTurn,
    SessionClosed,
    SleepWanted,
    StepEnded,
    SuspendTurn,
    TierHealthChanged,
    TransferDone,
    TurnArrived,
    TurnCancelled,
    TurnStopped,
    WakeCancelled,
    WakeHinted,
)
from kvstore.hints import Hints
from kvstore.rows import NO_ROW
from kvstore.snapshot import Snapshot, TierCounts, TurnCounts
from kvstore.store import Store
from kvstore.turns import Turn, TurnQueue, TurnState
from kvstore.types import StopReason, Tier, TurnId
from kvstore.upkeep import Upkeep
from kvstore.wakes import Wake, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tails import Tail
    from kvstore.types import BlockKey


__all__ = ["Planner", "PlannerConfig"]


class Help(Enum):
    """What can be done for a turn that lacks slots and can evict none."""

    NOW = "now"  # slots came free at once
    COMING = "coming"  # some turns will stop
    NONE = "none"


class Planner:
    """Decides everything the store does; see the module's rules."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self._actions: list[Action] = []
        self._store = Store(config, self._emit)
        self._branches = Branches(self._store)
        self._hints = Hints(self._store, config, self._emit)
        self._upkeep = Upkeep(self._store, config)
        self._blocks = self._store.blocks
        self._hbm = self._blocks.hbm
        self._rows = self._blocks.rows
        self._totals = self._blocks.totals
        self._queue = TurnQueue()
        self._turns: dict[TurnId, Turn] = {}
        self._granted: dict[TurnId, Turn] = {}  # WAKING, RUNNING and STOPPING
        self._growers: dict[TurnId, Turn] = {}  # RUNNING turns with a wish
        self._waking: dict[TurnId, Turn] = {}
        self._next_seq = 0

    # --- in and out -------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Record `event` and return what must be done, in this order. A clock that jumped back counts as standing."""
        self._rows.now = max(self._rows.now, now)
        match event:
            case StepEnded():
                self._on_step_ended(event)
            case TurnArrived():
                self._on_arrived(event)
            case GrowWanted():
                self._on_grow_wanted(event)
            case TransferDone():
                self._store.finish(event)
            case TurnCancelled():
                self._on_cancelled(event)
            case WakeHinted():
                self._hints.add(event, self._room(0))
            case WakeCancelled():
                self._hints.cancel(event.wake)
                self._cancel_unwanted_loads()
            case SleepWanted():
                if event.keys:
                    self._branches.put_to_sleep(event.keys)
            case BranchRecorded():
                self._branches.record(event)
            case SessionClosed():
                self._branches.close(event.tips)
            case TierHealthChanged():
                self._blocks.set_health(event.tier, event.health)
            case FlushWanted():
                self._blocks.flush()
            case _:
                assert_never(event)
        return self._pumped()

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due at `now`; calling it early or late is harmless."""
        self._rows.now = max(self._rows.now, now)
        self._store.expire()
        return self._pumped()

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is due next; None while only an event can change anything."""
        aging = self._queue.next_aging(self._rows.now, self.config.age_limit_seconds)
        wakes = (turn.wake for turn in self._waking.values() if turn.wake is not None and turn.wake.is_waiting)
        waking = min((wake.deadline for wake in wakes), default=None)
        loading = self._store.traffic.transfers.next_deadline()
        moments = (aging, waking, loading, self._hints.next_deadline())
        return min((moment for moment in moments if moment is not None), default=None)

    def snapshot(self) -> Snapshot:
        """Counters as of the last event."""
        suspended = sum(turn.suspended for turn in self._queue)
        return Snapshot(
            tiers=tuple(
                TierCounts(
                    tier=pool.tier,
                    capacity=pool.capacity,
                    free=pool.num_free,
                    open=pool.num_open,
                    filling=pool.num_filling,
                    valid=pool.num_valid,
                    quarantined=len(pool.quarantined),
                    pinned=pool.num_held,
                )
                for pool in self._blocks.pools
            ),
            turns=TurnCounts(
                waiting=len(self._queue) - suspended,
                suspended=suspended,
                granted=len(self._granted),
                waking=len(self._waking),
                stopping=sum(turn.state is TurnState.STOPPING for turn in self._granted.values()),
            ),
            totals=replace(self._totals),
            transfers=len(self._store.traffic.transfers),
            hints=len(self._hints),
        )

    def where(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """Per tier, how many blocks of the chain of `keys` are VALID there. Linear in `keys`; changes nothing."""
        rows = [row for row in map(self._rows.find, keys) if row != NO_ROW]
        return tuple(sum(map(pool.is_valid, rows)) for pool in self._blocks.pools)

    def __repr__(self) -> str:
        tiers = " ".join(f"{pool.tier.name} {pool.num_used}/{pool.capacity}" for pool in self._blocks.pools)
        turns = f"turns {len(self._granted)} active, {len(self._queue)} waiting"
        transfers = f" | transfers {len(self._store.traffic.transfers)}" if len(self._blocks.pools) > 1 else ""
        return f"<Planner {tiers} | {turns}{transfers}>"

    # --- events -----------------------------------------------------------------------

    def _on_arrived(self, event: TurnArrived) -> None:
        assert event.turn not in self._turns, f"turn {event.turn} arrived twice"
        self._totals.turns_arrived += 1
        if event.wake is not None:
            self._hints.take_over(event.wake)
        if self.config.blocks_for(event.prompt_tokens + 1) > self._hbm.capacity:
            self._totals.turns_refused_never_fits += 1
            self._emit(RefuseTurn(event.turn, Refusal.NEVER_FITS))
            return
        turn = Turn(
            id=event.turn,
            seq=self._next_seq,
            priority=event.priority,
            cache=event.cache,
            keys=list(event.keys) if event.cache else [],
            tokens=event.prompt_tokens,
            most_tokens=event.prompt_tokens + event.output_tokens,
            queued_at=self._rows.now,
        )
        self._next_seq += 1
        self._turns[turn.id] = turn
        self._queue.add(turn)
        self._pump()
        if event.wake is not None:
            self._cancel_unwanted_loads()
        if turn.state is TurnState.WAITING and self._num_new_waiters() > self.config.max_queue:
            self._forget_waiter(turn)
            self._totals.turns_refused_queue_full += 1
            self._emit(RefuseTurn(turn.id, Refusal.QUEUE_FULL))

    def _on_step_ended(self, event: StepEnded) -> None:
        for fill in event.fills:
            self._on_filled(self._granted[fill.turn], fill)
        for stopped in event.stopped:
            self._on_stopped(self._granted[stopped.turn], stopped)

    def _on_filled(self, turn: Turn, fill: Fill) -> None:
        if not turn.cache:
            return
        turn.note_key(fill.index, fill.key)
        rows, tip = self._rows, turn.tip
        if fill.index != (0 if tip == NO_ROW else rows.depth[tip] + 1):
            return  # its parent is not in the turn's chain: publishing would break prefix closure
        row = rows.find(fill.key)
        if row == NO_ROW:
            row = rows.add(fill.key, tip)
        assert rows.parent[row] == tip, f"turn {turn.id} filled a block whose key names another parent"
        if self._hbm.is_valid(row):
            self._totals.duplicate_fills += 1  # first copy won: this one stays private to the turn
        else:
            self._store.publish(row, turn.open.pop(fill.index))
        self._move_tip(turn, row)

    def _on_stopped(self, turn: Turn, stopped: TurnStopped) -> None:
        comes_back = stopped.reason is StopReason.SUSPENDED and not turn.cancelled
        if comes_back:
            self._put_tail_away(turn, stopped.computed_tokens)
        self._release(turn)
        if not comes_back:
            del self._turns[turn.id]
            return
        turn.tokens = stopped.tokens
        # The last token has no K/V yet: it is computed first when the turn goes on.
        del turn.keys[max(0, stopped.tokens - 1) // self.config.block_tokens :]
        turn.state, turn.suspended, turn.may_load, turn.queued_at = TurnState.WAITING, True, True, self._rows.now
        self._queue.add(turn)

    def _on_grow_wanted(self, event: GrowWanted) -> None:
        turn = self._granted.get(event.turn)
        if turn is None or turn.state is not TurnState.RUNNING:
            return  # it stopped, or was told to, while the wish was on its way
        turn.wanted = min(event.slots, self._hbm.capacity - turn.num_blocks)
        if turn.wanted > 0:
            self._growers[turn.id] = turn
        else:
            self._refuse_growth(turn)

    def _on_cancelled(self, event: TurnCancelled) -> None:
        turn = self._turns.get(event.turn)
        if turn is None:
            return  # it ended while the client left
        if turn.state is TurnState.WAKING:
            self._unadmit(turn)
        if turn.state is TurnState.WAITING:
            self._totals.turns_cancelled_waiting += 1
            self._forget_waiter(turn)
            self._cancel_unwanted_loads()
            return
        turn.cancelled = True
        self._stop(turn)

    # --- decisions --------------------------------------------------------------------

    def _pumped(self) -> list[Action]:
        self._pump()
        self._branches.sweep()
        self._upkeep.run()
        self._blocks.misses.clear()
        actions, self._actions = self._actions[:], []
        return actions

    def _pump(self) -> None:
        self._blocks.sweep()
        self._advance_wakes()
        owed, may_admit = self._supply_all()
        if may_admit:
            self._admit(owed)
            self._hints.advance()

    def _advance_wakes(self) -> None:
        """Protect what has arrived, before anything is evicted; give up what is past its deadline."""
        self._hints.observe()
        for turn in self._waking.values():
            assert turn.wake is not None
            turn.wake.advance()
            if turn.wake.deadline <= self._rows.now and turn.wake.is_waiting:
                turn.wake.cut(turn.wake.num_ready)
                turn.may_load = False
            turn.may_load = turn.may_load and turn.wake.miss is None

    def _supply_all(self) -> tuple[int, bool]:
        """Serve who holds slots and wants more: slots owed to them, and whether anyone may be admitted beside them."""
        owed = 0
        for turn in sorted((*self._growers.values(), *self._waking.values()), key=lambda turn: turn.order):
            if turn.id not in self._granted or turn.state is TurnState.STOPPING:
                continue  # it was made to give way meanwhile
            lacking = self._supply(turn, owed)
            if lacking and self._room(owed) < lacking:
                if not self._press(turn, lacking, owed):
                    return owed, False
                lacking = turn.lacking if turn.id in self._granted else 0
            owed += max(0, lacking)
            self._start_or_grant(turn)
        return owed, True

    def _supply(self, turn: Turn, owed: int) -> int:
        """Give `turn` what is free beyond `owed`, and see to it that more comes; slots it still lacks."""
        lacking = turn.lacking
        if lacking <= 0:
            return 0
        count = min(lacking, self._store.room.obtain(owed + lacking) - owed)
        if count <= 0:
            return lacking
        if turn.wake is None:  # a wish is settled with what is there
            self._settle(turn)
            self._emit(GrantSlots(turn.id, self._append_slots(turn, self._hbm.open(count))))
            return 0
        turn.wake.take(self._hbm.open(count))
        return lacking - count

    def _press(self, turn: Turn, lacking: int, owed: int) -> bool:
        """Evicting is not enough for `turn`. True when it was helped at once; else someone, perhaps itself, stops."""
        while (help_ := self._make_way(turn, lacking)) is Help.NOW:
            lacking = self._supply(turn, owed)
            if lacking <= self._room(owed):
                return True
        if help_ is Help.COMING:
            return False
        if turn is not self._oldest():
            if turn.state is TurnState.WAKING:
                self._unadmit(turn)
            else:
                self._suspend(turn)
            return False
        if turn.wake is not None or self._store.traffic.is_copying_hbm():
            return False  # copies under way, late ones among them, hold what it lacks
        self._give_up_duplicates(turn)
        if self._supply(turn, owed):
            self._refuse_growth(turn)
        return True

    def _start_or_grant(self, turn: Turn) -> None:
        if turn.wake is None or turn.state is not TurnState.WAKING:
            return
        turn.wake.start()
        if turn.wake.is_ready:
            self._grant(turn, turn.wake)

    def _admit(self, owed: int) -> None:
        held_back_from: int | None = None
        for turn in self._queue.aged(self._rows.now, self.config.age_limit_seconds):
            if not self._has_room_to_run():
                return
            if self._is_settling(turn):
                continue
            if not self._try_admit(turn, owed) and not self._admit_by_force(turn, owed):
                held_back_from = turn.seq
                break
            owed += self._lacking(turn)
        for turn in list(self._queue):
            if not self._has_room_to_run():
                return
            if held_back_from is not None and turn.seq > held_back_from:
                continue
            if self._is_settling(turn) or not self._try_admit(turn, owed):
                if turn.suspended:
                    return  # what was taken from it must not go to a turn less urgent than it
                continue
            owed += self._lacking(turn)

    def _admit_by_force(self, turn: Turn, owed: int) -> bool:
        """Admit an aged `turn` if room can be made at once; else make it, if that is possible."""
        rows = plan(self._blocks, turn.keys, turn.may_load)
        while self._make_way(turn, self._shortfall(turn, rows, owed)) is Help.NOW:
            if self._try_admit(turn, owed):
                return True
        return False

    def _try_admit(self, turn: Turn, owed: int) -> bool:
        """Admit `turn` if there is room, perhaps after evictions, beyond what is `owed`; else change nothing."""
        wanted = self._blocks_wanted(turn)
        if wanted - len(turn.keys) > self._room(owed):
            return False  # not even if all of it were in HBM: spares the look-up
        rows = plan(self._blocks, turn.keys, turn.may_load)
        if self._shortfall(turn, rows, owed) > 0:
            return False
        self._queue.remove(turn)
        self._granted[turn.id] = self._waking[turn.id] = turn
        turn.state = TurnState.WAKING
        turn.wake = Wake(
            store=self._store,
            rows=rows,
            num_slots=wanted,
            deadline=self._rows.now + self.config.wake_deadline_seconds,
            tail=self._fitting_tail(turn, rows),
        )
        turn.wake.begin()
        if turn.wake.tip != NO_ROW:
            self._blocks.cleaner.wake(turn.wake.tip)
        self._supply(turn, owed)
        self._start_or_grant(turn)
        return True

    def _grant(self, turn: Turn, wake: Wake) -> None:
        wake.give_back_surplus()
        num_rows, tail = len(wake.rows), wake.tail
        cached = num_rows * self.config.block_tokens if tail is None else tail.tokens
        reused = self._reused_blocks(wake.rows)
        turn.tip, slots, reserve = wake.hand_over()
        turn.wake, turn.state = None, TurnState.RUNNING
        del self._waking[turn.id]
        turn.open = dict(enumerate(slots[num_rows:], num_rows))
        turn.num_blocks = len(slots)
        resumed, turn.suspended = turn.suspended, False
        self._totals.turns_granted += not resumed
        self._totals.turns_resumed += resumed
        self._totals.reused += num_rows
        table = (*slots, *self._append_slots(turn, reserve))
        seconds = self._rows.now - (wake.deadline - self.config.wake_deadline_seconds)
        self._emit(GrantTurn(turn.id, table, cached, resumed, reused, wake.miss, seconds))

    def _make_way(self, wanter: Turn, count: int) -> Help:
        """See to it that `count` more slots come: from hints, and from the least urgent turns younger than `wanter`."""
        if self._hints.give_way():
            return Help.NOW
        coming = sum(self._gain(turn) for turn in self._granted.values() if turn.state is TurnState.STOPPING)
        victims = []
        for turn in sorted(self._granted.values(), key=lambda turn: turn.order, reverse=True):
            if coming >= count:
                break
            if self._may_suspend(turn, wanter):
                victims.append(turn)
                coming += self._gain(turn)
        if wanter.state is TurnState.WAITING and coming < count:
            return Help.NONE  # suspending would not be enough to admit it: let the others finish
        for turn in victims:
            if turn.state is TurnState.WAKING:
                self._unadmit(turn)
                return Help.NOW
            self._suspend(turn)
        return Help.COMING if coming > 0 else Help.NONE

    def _may_suspend(self, turn: Turn, wanter: Turn) -> bool:
        if turn.state is TurnState.STOPPING or turn.seq <= wanter.seq or turn is self._oldest():
            return False
        return wanter.state is not TurnState.WAITING or turn.priority >= wanter.priority

    def _gain(self, turn: Turn) -> int:
        """Slots that the end of `turn` would free or make evictable."""
        if turn.wake is not None:
            return len(turn.wake.reserve) + self._hbm.num_held_alone(turn.wake.tip)
        return len(turn.open) + self._hbm.num_held_alone(turn.tip)

    def _suspend(self, turn: Turn) -> None:
        self._totals.turns_suspended += 1
        self._stop(turn)
        self._emit(SuspendTurn(turn.id))

    def _unadmit(self, turn: Turn) -> None:
        """Take back what a WAKING turn holds: it waits again, as old as it is."""
        assert turn.wake is not None
        if turn.wake.tip != NO_ROW:
            self._blocks.cleaner.rest(turn.wake.tip)
        turn.tail = turn.wake.release_tail()
        turn.wake.end()
        turn.wake, turn.state = None, TurnState.WAITING
        del self._granted[turn.id], self._waking[turn.id]
        self._queue.add(turn)

    def _give_up_duplicates(self, turn: Turn) -> None:
        """Let go of published copies of blocks that `turn`, which runs alone, also holds privately.

        Its own blocks below the first such block become private too, since HBM is closed under
        prefixes; then the turn holds its block table and nothing else, so what fits alone does.
        """
        first, row = min(turn.open, default=turn.num_blocks), turn.tip
        num_given_up = 0 if row == NO_ROW else self._rows.depth[row] + 1 - first
        if num_given_up <= 0 or self._hbm.num_held_alone(row) < num_given_up:
            return  # none, or a transfer still needs one of them
        tip = row
        for _ in range(num_given_up):
            tip = self._rows.parent[tip]
        self._move_tip(turn, tip)
        while row != tip:
            parent, index = self._rows.parent[row], self._rows.depth[row]
            if index in turn.open:
                self._totals.evicted += 1
                self._blocks.drop(Tier.HBM, row)
            else:
                turn.open[index] = self._blocks.reopen(row)
            row = parent

    def _cancel_unwanted_loads(self) -> None:
        """Loads that no turn and no hint waits for."""
        wanted = {row for turn in self._waking.values() if turn.wake is not None for row in turn.wake.rows}
        self._store.traffic.cancel_loads_except(wanted | self._hints.rows())

    # --- pieces -----------------------------------------------------------------------

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    def _room(self, owed: int) -> int:
        """Slots of HBM that are free or can be had by evicting, beyond those owed."""
        return self._hbm.num_free + self._hbm.evictable + self._store.traffic.coming - owed

    def _shortfall(self, turn: Turn, rows: list[int], owed: int) -> int:
        """Slots that `turn` lacks to be admitted with `rows`; protecting those in HBM makes them unevictable."""
        is_present, is_valid = self._hbm.is_present, self._hbm.is_valid
        present = sum(map(is_present, rows))
        tip = next((row for row in reversed(rows[:present]) if is_valid(row)), NO_ROW)
        return self._blocks_wanted(turn) - present - (self._room(owed) - self._hbm.num_unheld(tip))

    def _blocks_wanted(self, turn: Turn) -> int:
        """Blocks for its tokens so far and the next slice of output; never more than there are."""
        tokens = min(turn.most_tokens, turn.tokens + self.config.output_slice_tokens)
        return min(self.config.blocks_for(tokens), self._hbm.capacity)

    def _lacking(self, turn: Turn) -> int:
        return max(0, turn.lacking) if turn.state is TurnState.WAKING else 0

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

    def _put_tail_away(self, turn: Turn, computed_tokens: int) -> None:
        first = 0 if turn.tip == NO_ROW else self._rows.depth[turn.tip] + 1
        indices = range(first, self.config.blocks_for(computed_tokens))
        if indices and len(self._blocks.pools) > 1:
            slots = [turn.open.pop(index) for index in indices]
            turn.tail = self._store.tails.put_away(first, slots, computed_tokens)

    def _reused_blocks(self, rows: list[int]) -> tuple[int, int, int]:
        """Count `rows` by the tier they came from; from now on they count as never having left."""
        origin = self._rows.origin
        counts = [0, 0, 0]
        for row in rows:
            counts[origin[row]] += 1
            origin[row] = Tier.HBM
        return counts[0], counts[1], counts[2]

    def _append_slots(self, turn: Turn, slots: list[int]) -> tuple[int, ...]:
        """Append OPEN slots to the block table of `turn`."""
        turn.open.update(enumerate(slots, turn.num_blocks))
        turn.num_blocks += len(slots)
        return tuple(slots)

    def _move_tip(self, turn: Turn, row: int) -> None:
        """Pin `row` in place of the turn's tip: the new one first, so that the chain is never unprotected."""
        if row != NO_ROW:
            self._hbm.pin(row)
        if turn.tip != NO_ROW:
            self._blocks.unpin(Tier.HBM, turn.tip)
        turn.tip = row

    def _release(self, turn: Turn) -> None:
        self._settle(turn)
        self._hbm.close(list(turn.open.values()))
        turn.open.clear()
        turn.num_blocks = 0
        if turn.tip != NO_ROW:
            self._rows.touch(turn.tip)
            self._blocks.cleaner.rest(turn.tip)
            self._move_tip(turn, NO_ROW)
        del self._granted[turn.id]

    def _stop(self, turn: Turn) -> None:
        self._settle(turn)
        turn.state = TurnState.STOPPING

    def _settle(self, turn: Turn) -> None:
        turn.wanted = 0
        self._growers.pop(turn.id, None)

    def _refuse_growth(self, turn: Turn) -> None:
        self._settle(turn)
        self._totals.growths_refused += 1
        self._emit(RefuseGrowth(turn.id))

    def _forget_waiter(self, turn: Turn) -> None:
        if turn.tail is not None:
            self._store.tails.forget(turn.tail)
        self._queue.remove(turn)
        del self._turns[turn.id]

    def _has_room_to_run(self) -> bool:
        return len(self._granted) < self.config.max_running

    def _num_new_waiters(self) -> int:
        return sum(not turn.suspended for turn in self._queue)

    def _oldest(self) -> Turn | None:
        """The admitted turn that arrived first, of those that go on; it is never suspended."""
        going_on = (turn for turn in self._granted.values() if turn.state is not TurnState.STOPPING)
        return min(going_on, key=lambda turn: turn.seq, default=None)

    # --- laws -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, saying what is wrong, unless all laws of the store hold. Linear in everything."""
        store = self._store
        laws.check_tiers(store)
        self._check_turns()
        wakes = [turn.wake for turn in self._waking.values() if turn.wake is not None]
        wakes += [hint.wake for hint in self._hints]
        tails = {*store.tails, *(turn.tail for turn in self._queue), *(wake.tail for wake in wakes)} - {None}
        pins = {pool.tier: Counter[int]() for pool in store.blocks.pools}
        for wake in wakes:
            for tier, row in wake.pins():
                pins[tier][row] += 1
        pins[Tier.HBM].update(turn.tip for turn in self._granted.values() if turn.tip != NO_ROW)
        for pool in store.blocks.pools:
            owned = [slot for tail in tails if tail is not None for slot in tail.slots_in(pool.tier)]
            if pool.tier is Tier.HBM:
                owned += [slot for turn in self._granted.values() for slot in turn.open.values()]
                owned += [slot for wake in wakes for slot in wake.reserve]
            laws.check_owners(store, pool.tier, owned, pins[pool.tier])
        if not self._turns and not self._hints and not store.traffic.transfers:
            laws.check_idle(store)

    def _check_turns(self) -> None:
        waiting, granted = list(self._queue), list(self._granted.values())
        assert {turn.id for turn in (*waiting, *granted)} == self._turns.keys(), "a turn is lost or counted twice"
        assert len(waiting) + len(granted) == len(self._turns), "a turn both waits and runs"
        assert len(granted) <= self.config.max_running, "more turns run than may"
        for turn in waiting:
            assert turn.state is TurnState.WAITING, f"queued turn {turn.id} is {turn.state.value}"
            assert turn.tip == NO_ROW, f"queued turn {turn.id} pins a block"
            assert turn.wake is None, f"queued turn {turn.id} holds a wake"
            assert not turn.open, f"queued turn {turn.id} holds slots"
        for turn in granted:
            assert turn.state is not TurnState.WAITING, f"granted turn {turn.id} is waiting"
            laws.check_table(self._store, turn)
        waking = {turn.id for turn in granted if turn.state is TurnState.WAKING}
        assert self._waking.keys() == waking, f"waking turns are {waking}"
        growers = {turn.id for turn in granted if turn.wanted}
        assert self._growers.keys() == growers, f"growers are {growers}"
