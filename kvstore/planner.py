"""The whole store as one state machine: (event, now) -> actions (pure).

It owns residency: who is granted, who waits, who is suspended, which blocks stay. It holds
no lock, does no IO and reads no clock. Events only record what happened; `Admission.run`
is the only place that admits, evicts, loads, suspends and grants.

    Planner      events in, actions out
    Roster       which turns there are, and in which state
    Admission    who gets slots, in which order, and who gives way
    Tables       what granted turns hold
    Wake, Hints  bringing chains up, for a turn or ahead of it
    LookAhead    the same for turns that wait
    Branches     what sessions said about their chains
    Upkeep       what is done ahead of need
    Returns      which branches will be needed soon
    Sinking      what is written to NVMe ahead of need
    Store        blocks, tiers, transfers, room and tails

Rules, and why:

- A turn is admitted with the longest prefix that is somewhere, and slots for the rest of its
  prompt and a first slice of output. It is granted in the call that finds all of it in HBM, so
  that no eviction in between can see an idle prefix (httpcore #1110).
- The slots of a turn that was told to stop are touched only after StepEnded said it stopped.
- Progress never waits for a lower tier: what that does not take, or not in time, is dropped
  and computed again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from kvstore import laws
from kvstore.admission import Admission
from kvstore.branches import Branches
from kvstore.config import PlannerConfig
from kvstore.events import (
    BlocksFound,
    BranchesFound,
    BranchRecorded,
    FlushDown,
    FlushWanted,
    GrowWanted,
    Refusal,
    RefuseTurn,
    SessionClosed,
    SleepWanted,
    SlotsErased,
    StartTransfer,
    StepEnded,
    TierHealthChanged,
    TransferDone,
    TurnArrived,
    TurnCancelled,
    TurnSettled,
    TurnStopped,
    WakeCancelled,
    WakeHinted,
)
from kvstore.found import adopt
from kvstore.hints import Hints
from kvstore.lookahead import LookAhead
from kvstore.returns import Returns
from kvstore.roster import Roster
from kvstore.rows import NO_ROW
from kvstore.sinking import Sinking
from kvstore.snapshot import Snapshot, TierCounts
from kvstore.store import Store
from kvstore.tables import Tables
from kvstore.turns import Turn, TurnState
from kvstore.types import StopReason, Tier
from kvstore.upkeep import Upkeep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.events import Action, Event
    from kvstore.types import BlockKey, TurnId

__all__ = ["Planner", "PlannerConfig"]


class Planner:
    """Decides everything the store does; see the module's rules."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self._actions: list[Action] = []
        self._store = Store(config, self._emit)
        self._roster = Roster(config, self._store.blocks.rows.tenancy)
        self._tables = Tables(self._store, config)
        self._hints = Hints(self._store, config, self._emit)
        self._look_ahead = LookAhead(self._store, self._roster, config)
        self._admission = Admission(
            config, self._store, self._roster, self._tables, self._hints, self._look_ahead, self._emit
        )
        self._sinking = Sinking(self._store, config, self._emit)
        self._branches = Branches(self._store, self._sinking, config)
        self._returns = Returns(self._store, self._hints, config)
        self._upkeep = Upkeep(self._store, config)
        self._unsettled: dict[TurnId, BlockKey] = {}  # turns that ended: where each rests until it is settled
        self._blocks = self._store.blocks
        self._totals = self._blocks.totals

    # --- in and out -------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Record `event` and return what must be done, in this order. A clock that jumped back counts as standing."""
        self._blocks.rows.now = max(self._blocks.rows.now, now)
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
            case TurnSettled(turn):
                self._on_settled(turn)
            case WakeHinted():
                self._hints.add(event)
            case WakeCancelled():
                self._hints.cancel(event.wake)
                self._cancel_unwanted_loads()
            case SleepWanted():
                self._branches.put_to_sleep(event.keys, event.target)
            case BranchesFound(branches):
                for branch in branches:
                    self._branches.record(branch)
            case BranchRecorded():
                self._branches.record(event)
                self._returns.recorded(event)
            case SessionClosed():
                self._branches.close(event)
                self._returns.closed(event.tips)
            case TierHealthChanged():
                self._blocks.set_health(event.tier, event.health)
            case FlushWanted():
                self._blocks.flush()
            case BlocksFound():
                adopt(self._blocks, event.blocks, event.owners)
            case SlotsErased():
                self._blocks.pools[Tier.NVME].erased(event.slots)
            case FlushDown():
                self._sinking.drain(event.deadline)
            case _:
                assert_never(event)
        return self._pumped()

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due at `now`; calling it early or late is harmless."""
        self._blocks.rows.now = max(self._blocks.rows.now, now)
        self._store.expire()
        return self._pumped()

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is due next; None while only an event can change anything."""
        moments = (
            self._roster.queue.next_aging(self._blocks.rows.now, self.config.age_limit_seconds),
            self._roster.next_deadline(),
            self._hints.next_deadline(),
            self._store.traffic.transfers.next_deadline(),
            self._sinking.next_moment(),
            self._returns.next_moment(),
            self._blocks.health.next_probe(),
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def snapshot(self) -> Snapshot:
        """Counters as of the last event."""
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
                    erasing=len(pool.erasing),
                    health=self._blocks.health.of(pool.tier, self._blocks.rows.now),
                    read_blocks_per_second=self._blocks.cost.read_rate(pool.tier, self._blocks.rows.now),
                )
                for pool in self._blocks.pools
            ),
            turns=self._roster.counts(),
            totals=replace(self._totals),
            transfers=len(self._store.traffic.transfers),
            hints=len(self._hints),
            dirty_blocks=len(self._blocks.dirty.rows),
            sinking_blocks=self._sinking.num_sinking,
            nvme_write_policy=self._sinking.policy,
            prefill_tokens_per_second=self._blocks.cost.prefill.per_second(self._blocks.rows.now),
            nvme_bytes_last_day=self._blocks.budget.last_day(self._blocks.rows.now),
        )

    def on_nvme(self) -> dict[int, BlockKey]:
        """What each slot of NVMe holds. Linear: for tests and `store verify`."""
        if not self._blocks.has_tier(Tier.NVME):
            return {}
        rows, nvme = self._blocks.rows, self._blocks.pools[Tier.NVME]
        return {nvme.slot(row): rows.key(row) for row in rows if nvme.is_valid(row)}

    def locate(self, keys: Sequence[BlockKey]) -> list[tuple[Tier, ...]]:
        """For each of `keys` the tiers that hold its block, fastest first; none for a block that is nowhere."""
        rows = map(self._blocks.rows.find, keys)
        return [tuple(pool.tier for pool in self._blocks.pools if row != NO_ROW and pool.is_valid(row)) for row in rows]

    def are_falling_asleep(self, keys: Sequence[BlockKey]) -> bool:
        """Is a SleepWanted for this chain still being carried out? Only an event or a deadline ends that."""
        return self._branches.are_falling_asleep(keys)

    def __repr__(self) -> str:
        tiers = " ".join(f"{pool.tier.name} {pool.num_used}/{pool.capacity}" for pool in self._blocks.pools)
        turns = f"turns {len(self._roster.admitted)} active, {len(self._roster.queue)} waiting"
        transfers = f" | transfers {len(self._store.traffic.transfers)}" if len(self._blocks.pools) > 1 else ""
        return f"<Planner {tiers} | {turns}{transfers}>"

    def check(self) -> None:
        """Raise AssertionError, saying what is wrong, unless all laws of the store hold. Linear in everything."""
        laws.check(self._store, self._roster, self._hints)

    # --- events -----------------------------------------------------------------------

    def _on_arrived(self, event: TurnArrived) -> None:
        self._totals.turns_arrived += 1
        if event.wake is not None:
            self._hints.take_over(event.wake)
        if self.config.blocks_for(event.prompt_tokens + 1) > self._blocks.hbm.capacity:
            self._totals.turns_refused_never_fits += 1
            self._emit(RefuseTurn(event.turn, Refusal.NEVER_FITS))
            return
        self._returns.arrived(event.keys)
        turn = self._roster.arrive(event, self._blocks.rows.tenancy.index(event.tenant), self._blocks.rows.now)
        self._admission.run()
        turn.has_waited = turn.state is TurnState.WAITING
        if event.wake is not None:
            self._cancel_unwanted_loads()
        if turn.state is TurnState.WAITING and self._roster.num_new_waiters() > self.config.max_queue:
            self._roster.forget(turn)
            self._totals.turns_refused_queue_full += 1
            self._emit(RefuseTurn(turn.id, Refusal.QUEUE_FULL))

    def _on_step_ended(self, event: StepEnded) -> None:
        if event.seconds:
            self._blocks.cost.note_step(event.seconds, event.prefill_tokens, event.decode_tokens, self._blocks.rows.now)
        admitted = self._roster.admitted
        for fill in event.fills:
            self._tables.fill(admitted[fill.turn], fill)
        for stopped in event.stopped:
            self._on_stopped(admitted[stopped.turn], stopped)

    def _on_stopped(self, turn: Turn, stopped: TurnStopped) -> None:
        if turn.cancelled or stopped.reason in (StopReason.CANCELLED, StopReason.FAILED):
            self._tables.release(turn)
            self._forget(turn)
            return
        if stopped.reason is not StopReason.SUSPENDED:
            self._rest(turn)
            self._tables.release(turn)
            self._roster.forget(turn)
            if turn.rests_at is not None:
                self._unsettled[turn.id] = turn.rests_at
            return
        self._tables.put_tail_away(turn, stopped.computed_tokens)
        self._rest(turn)
        self._tables.release(turn)
        turn.tokens = stopped.tokens
        # The last token has no K/V yet: it is computed first when the turn goes on.
        del turn.keys[max(0, stopped.tokens - 1) // self.config.block_tokens :]
        self._roster.suspend(turn, self._blocks.rows.now)

    def _rest(self, turn: Turn) -> None:
        """Whoever waits may take its room from now on: what it has computed may have to go down before it goes on, or
        before its branch is recorded."""
        rested_at, turn.rests_at = turn.rests_at, None
        if turn.to_nvme and turn.tip != NO_ROW and self._blocks.has_tier(Tier.NVME):
            turn.rests_at = self._blocks.rows.key(turn.tip)
            self._branches.rest(turn.rests_at)
        if rested_at is not None:
            self._branches.end_rest(rested_at, turn.keys)

    def _on_settled(self, turn: TurnId) -> None:
        rests_at = self._unsettled.pop(turn, None)
        if rests_at is not None:
            self._branches.end_rest(rests_at)

    def _on_grow_wanted(self, event: GrowWanted) -> None:
        turn = self._roster.admitted.get(event.turn)
        if turn is None or turn.state is not TurnState.RUNNING:
            return  # it stopped, or was told to, while the wish was on its way
        slots = min(event.slots, self._blocks.hbm.capacity - turn.num_blocks)
        if slots > 0:
            self._roster.want(turn, slots)
        else:
            self._admission.refuse_growth(turn)

    def _on_cancelled(self, event: TurnCancelled) -> None:
        turn = self._roster.turns.get(event.turn)
        if turn is None:
            return  # it ended while the client left
        if turn.state is TurnState.WAKING:
            self._admission.unadmit(turn)
        if turn.state is not TurnState.WAITING:
            turn.cancelled = True
            self._roster.stop(turn)
            return
        self._totals.turns_cancelled_waiting += 1
        if turn.tail is not None:
            self._store.tails.forget(turn.tail)
        self._forget(turn)
        self._cancel_unwanted_loads()

    def _forget(self, turn: Turn) -> None:
        """It is over."""
        self._roster.forget(turn)
        if turn.rests_at is not None:
            self._branches.end_rest(turn.rests_at, turn.keys)

    # --- decisions --------------------------------------------------------------------

    def _pumped(self) -> list[Action]:
        if self.config.predict_returns:
            self._returns.run()
        self._admission.run()
        self._blocks.sweep()
        self._branches.sweep()
        self._upkeep.run()
        self._sinking.run()
        self._blocks.health.probe(self._blocks.rows.now)
        self._blocks.misses.clear()
        self._blocks.ledger.flush()
        actions, self._actions = self._actions, []
        return actions

    def _cancel_unwanted_loads(self) -> None:
        """Cancel loads that no turn waits for, or soon will, and no hint."""
        wanted = {row for turn in self._roster.waking.values() if turn.wake is not None for row in turn.wake.rows}
        self._store.traffic.cancel_loads_except(wanted | self._hints.rows() | self._look_ahead.rows())

    def _emit(self, action: Action) -> None:
        if type(action) is StartTransfer and action.target is Tier.NVME:
            self._blocks.ledger.flush()  # what its slots held is forgotten before they are written
        self._actions.append(action)
