"""The whole store as one state machine: (event, now) -> actions (pure).

It owns residency: who is granted, who waits, who is suspended, which blocks stay. It holds
no lock, does no IO and reads no clock. `_pump` is the only place that grants, evicts and
suspends; events only record what happened.

Rules, and why:

- A turn is granted with the longest VALID prefix pinned, OPEN slots for the rest of its
  prompt and a first slice of output; the grant makes it RUNNING in the same call, so that
  no eviction in between can see an idle prefix (httpcore #1110).
- Nothing is evicted for a turn unless evicting is enough: `free + evictable` is exact.
- Growers come before the queue, older before younger; while one of them waits nobody takes
  slots, or a suspended turn's slots would go to the wrong one.
- Only older turns suspend younger ones, so two turns never suspend each other in turn; the
  oldest admitted turn is never suspended, so something always advances.
- The slots of a turn that was told to stop are touched only after StepEnded said it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from kvstore.events import (
    Action,
    Event,
    Fill,
    FlushWanted,
    GrantSlots,
    GrantTurn,
    GrowWanted,
    Refusal,
    RefuseGrowth,
    RefuseTurn,
    StepEnded,
    SuspendTurn,
    TurnArrived,
    TurnCancelled,
    TurnStopped,
)
from kvstore.policy import Kind
from kvstore.pool import Pool
from kvstore.rows import NO_ROW, Rows
from kvstore.snapshot import Snapshot, TierCounts, Totals, TurnCounts
from kvstore.turns import Turn, TurnQueue, TurnState
from kvstore.types import StopReason, Tier, TurnId


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Sizes and limits. A waiter older than `age_limit_seconds` holds younger admissions back."""

    hbm_slots: int
    block_tokens: int
    max_running: int
    max_queue: int
    age_limit_seconds: float
    output_slice_tokens: int = 64

    def __post_init__(self) -> None:
        assert self.hbm_slots > 0
        assert self.block_tokens > 0
        assert self.max_running > 0
        assert self.max_queue >= 0
        assert self.output_slice_tokens > 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens, the last one partial or not."""
        return -(-tokens // self.block_tokens)


class Planner:
    """Decides everything the store does; see the module's rules."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self._rows = Rows(tiers=1)
        self._hbm = Pool(Tier.HBM, config.hbm_slots, self._rows)
        self._queue = TurnQueue()
        self._turns: dict[TurnId, Turn] = {}
        self._granted: dict[TurnId, Turn] = {}  # RUNNING and STOPPING
        self._growers: dict[TurnId, Turn] = {}  # RUNNING turns with a wish
        self._next_seq = 0
        self._now = 0.0
        self._totals = Totals()
        self._actions: list[Action] = []

    # --- in and out -------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Record `event` and return what must be done, in this order. A clock that jumped back counts as standing."""
        self._now = max(self._now, now)
        match event:
            case TurnArrived():
                self._on_arrived(event)
            case StepEnded():
                self._on_step_ended(event)
            case GrowWanted():
                self._on_grow_wanted(event)
            case TurnCancelled():
                self._on_cancelled(event)
            case FlushWanted():
                self._on_flush_wanted()
            case _:
                assert_never(event)
        return self._pumped()

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due at `now`; calling it early or late is harmless."""
        self._now = max(self._now, now)
        return self._pumped()

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is due next; None while only an event can change anything."""
        return self._queue.next_aging(self._now, self.config.age_limit_seconds)

    def snapshot(self) -> Snapshot:
        """Counters as of the last event."""
        hbm = self._hbm
        suspended = sum(turn.suspended for turn in self._queue)
        stopping = sum(turn.state is TurnState.STOPPING for turn in self._granted.values())
        return Snapshot(
            tiers=(
                TierCounts(
                    tier=Tier.HBM,
                    capacity=hbm.capacity,
                    free=hbm.num_free,
                    open=hbm.num_open,
                    filling=hbm.num_filling,
                    valid=hbm.num_valid,
                    quarantined=hbm.num_quarantined,
                    pinned=hbm.num_held,
                ),
            ),
            turns=TurnCounts(
                waiting=len(self._queue) - suspended,
                suspended=suspended,
                granted=len(self._granted),
                stopping=stopping,
            ),
            totals=replace(self._totals),
        )

    def __repr__(self) -> str:
        turns = f"{len(self._granted)} active, {len(self._queue)} waiting"
        return f"<Planner HBM {self._hbm.num_used}/{self._hbm.capacity} | turns {turns}>"

    # --- events -----------------------------------------------------------------------

    def _on_arrived(self, event: TurnArrived) -> None:
        assert event.turn not in self._turns, f"turn {event.turn} arrived twice"
        self._totals.turns_arrived += 1
        if self.config.blocks_for(event.prompt_tokens + 1) > self._hbm.capacity:
            self._totals.turns_refused_never_fits += 1
            self._actions.append(RefuseTurn(event.turn, Refusal.NEVER_FITS))
            return
        turn = Turn(
            id=event.turn,
            seq=self._next_seq,
            priority=event.priority,
            cache=event.cache,
            keys=list(event.keys) if event.cache else [],
            tokens=event.prompt_tokens,
            most_tokens=event.prompt_tokens + event.output_tokens,
            queued_at=self._now,
        )
        self._next_seq += 1
        self._turns[turn.id] = turn
        self._queue.add(turn)
        self._pump()
        if turn.state is TurnState.WAITING and self._num_new_waiters() > self.config.max_queue:
            self._forget_waiter(turn)
            self._totals.turns_refused_queue_full += 1
            self._actions.append(RefuseTurn(turn.id, Refusal.QUEUE_FULL))

    def _on_step_ended(self, event: StepEnded) -> None:
        for fill in event.fills:
            self._on_filled(self._granted[fill.turn], fill)
        for stopped in event.stopped:
            self._on_stopped(self._granted[stopped.turn], stopped)

    def _on_filled(self, turn: Turn, fill: Fill) -> None:
        if not turn.cache:
            return
        turn.note_key(fill.index, fill.key)
        rows, hbm, tip = self._rows, self._hbm, turn.tip
        if fill.index != (0 if tip == NO_ROW else rows.depth[tip] + 1):
            return  # its parent is not in the turn's chain: publishing would break prefix closure
        row = rows.find(fill.key)
        if row == NO_ROW:
            row = rows.add(fill.key, tip, Kind.NORMAL, self._now)
        assert rows.parent[row] == tip, f"turn {turn.id} filled a block whose key names another parent"
        if hbm.is_valid(row):
            self._totals.duplicate_fills += 1  # first copy won: this one stays private to the turn
        else:
            hbm.publish(row, turn.open.pop(fill.index))
            self._totals.published += 1
        self._move_tip(turn, row)

    def _on_stopped(self, turn: Turn, stopped: TurnStopped) -> None:
        self._release(turn)
        if stopped.reason is not StopReason.SUSPENDED or turn.cancelled:
            del self._turns[turn.id]
            return
        turn.tokens = stopped.tokens
        # The last token has no K/V yet: it is computed first when the turn goes on.
        del turn.keys[max(0, stopped.tokens - 1) // self.config.block_tokens :]
        turn.state, turn.suspended, turn.queued_at = TurnState.WAITING, True, self._now
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
        if turn.state is TurnState.WAITING:
            self._totals.turns_cancelled_waiting += 1
            self._forget_waiter(turn)
            return
        turn.cancelled = True
        self._stop(turn)

    def _on_flush_wanted(self) -> None:
        self._totals.flushed += self._hbm.evictable
        for _ in range(self._hbm.evictable):
            self._drop(self._hbm.frontier.coldest())

    # --- decisions --------------------------------------------------------------------

    def _pumped(self) -> list[Action]:
        self._pump()
        actions, self._actions = self._actions, []
        return actions

    def _pump(self) -> None:
        if self._serve_growers():
            self._admit()

    def _serve_growers(self) -> bool:
        """False while a running turn waits for slots: until then nobody else may take any."""
        for turn in sorted(self._growers.values(), key=lambda turn: turn.order):
            if turn.wanted and not self._grow(turn):
                return False
        return True

    def _grow(self, turn: Turn) -> bool:
        """Grant what is there, one slot at least; else see to it that some come. True when the wish is settled."""
        available = self._hbm.num_free + self._hbm.evictable
        if available:
            self._grant_slots(turn, min(turn.wanted, available))
            return True
        if self._make_way(turn, turn.wanted):
            return False
        if turn is not self._oldest():
            self._suspend(turn)
            return False
        self._give_up_duplicates(turn)
        available = self._hbm.num_free + self._hbm.evictable
        if available:
            self._grant_slots(turn, min(turn.wanted, available))
        else:
            self._refuse_growth(turn)
        return True

    def _grant_slots(self, turn: Turn, count: int) -> None:
        self._settle(turn)
        self._actions.append(GrantSlots(turn.id, self._open_slots(turn, count)))

    def _refuse_growth(self, turn: Turn) -> None:
        self._settle(turn)
        self._totals.growths_refused += 1
        self._actions.append(RefuseGrowth(turn.id))

    def _admit(self) -> None:
        held_back_from: int | None = None
        for turn in self._queue.aged(self._now, self.config.age_limit_seconds):
            if not self._has_room_to_run():
                return
            if not self._try_grant(turn):
                self._make_way(turn, self._shortfall(turn, self._cached_prefix(turn)))
                held_back_from = turn.seq
                break
        for turn in list(self._queue):
            if not self._has_room_to_run():
                return
            if held_back_from is not None and turn.seq > held_back_from:
                continue
            if not self._try_grant(turn) and turn.suspended:
                return  # what was taken from it must not go to a turn less urgent than it

    def _try_grant(self, turn: Turn) -> bool:
        """Grant `turn` if free and evictable slots are enough; else change nothing."""
        hbm = self._hbm
        wanted = self._blocks_wanted(turn)
        if wanted - len(turn.keys) > hbm.num_free + hbm.evictable:
            return False  # not even if all of it were cached: spares the look-up
        prefix = self._cached_prefix(turn)
        if self._shortfall(turn, prefix) > 0:
            return False
        self._queue.remove(turn)
        self._granted[turn.id] = turn
        self._totals.turns_granted += not turn.suspended
        self._totals.turns_resumed += turn.suspended
        self._totals.reused += len(prefix)
        resumed, turn.suspended, turn.state = turn.suspended, False, TurnState.RUNNING
        self._move_tip(turn, prefix[-1] if prefix else NO_ROW)
        turn.num_blocks = len(prefix)
        slots = (*map(hbm.slot, prefix), *self._open_slots(turn, wanted - len(prefix)))
        self._actions.append(GrantTurn(turn.id, slots, len(prefix) * self.config.block_tokens, resumed))
        return True

    def _shortfall(self, turn: Turn, prefix: list[int]) -> int:
        """Slots that `turn` lacks to be granted with `prefix`; protecting the prefix makes it unevictable."""
        protected = self._hbm.num_unheld(prefix[-1]) if prefix else 0
        room = self._hbm.num_free + self._hbm.evictable - protected
        return self._blocks_wanted(turn) - len(prefix) - room

    def _make_way(self, wanter: Turn, count: int) -> bool:
        """Suspend the least urgent turns younger than `wanter` until `count` more slots are coming; are any?"""
        coming = sum(self._gain(turn) for turn in self._granted.values() if turn.state is TurnState.STOPPING)
        victims = []
        for turn in sorted(self._granted.values(), key=lambda turn: turn.order, reverse=True):
            if coming >= count:
                break
            if self._may_suspend(turn, wanter):
                victims.append(turn)
                coming += self._gain(turn)
        if wanter.state is TurnState.WAITING and coming < count:
            return False  # suspending would not be enough to admit it: let the others finish
        for turn in victims:
            self._suspend(turn)
        return coming > 0

    def _may_suspend(self, turn: Turn, wanter: Turn) -> bool:
        if turn.state is not TurnState.RUNNING or turn.seq <= wanter.seq or turn is self._oldest():
            return False
        return wanter.state is TurnState.RUNNING or turn.priority >= wanter.priority

    def _gain(self, turn: Turn) -> int:
        """Slots that the end of `turn` would free or make evictable."""
        return len(turn.open) + self._hbm.num_held_alone(turn.tip)

    def _suspend(self, turn: Turn) -> None:
        self._totals.turns_suspended += 1
        self._stop(turn)
        self._actions.append(SuspendTurn(turn.id))

    def _give_up_duplicates(self, turn: Turn) -> None:
        """Let go of published copies of blocks that `turn`, which runs alone, also holds privately.

        Its own blocks below the first such block become private too, since HBM is closed under
        prefixes; then the turn holds its block table and nothing else, so what fits alone does.
        """
        first = min(turn.open, default=turn.num_blocks)
        if turn.tip == NO_ROW or self._rows.depth[turn.tip] < first:
            return
        self._on_flush_wanted()
        row = turn.tip
        tip = row
        while tip != NO_ROW and self._rows.depth[tip] >= first:
            tip = self._rows.parent[tip]
        self._move_tip(turn, tip)
        while row != tip and self._hbm.frontier.coldest() == row:
            parent, index = self._rows.parent[row], self._rows.depth[row]
            if index in turn.open:
                self._drop(row)
            else:
                turn.open[index] = self._hbm.reopen(row)
                self._rows.forget_unused(row)
            row = parent

    # --- pieces -----------------------------------------------------------------------

    def _blocks_wanted(self, turn: Turn) -> int:
        """Blocks for its tokens so far and the next slice of output; never more than there are."""
        tokens = min(turn.most_tokens, turn.tokens + self.config.output_slice_tokens)
        return min(self.config.blocks_for(tokens), self._hbm.capacity)

    def _cached_prefix(self, turn: Turn) -> list[int]:
        prefix: list[int] = []
        for key in turn.keys:
            row = self._rows.find(key)
            if row == NO_ROW or not self._hbm.is_valid(row):
                break
            prefix.append(row)
        return prefix

    def _open_slots(self, turn: Turn, count: int) -> tuple[int, ...]:
        """Append `count` OPEN slots to the block table of `turn`, evicting for them; they must be obtainable."""
        while self._hbm.num_free < count:
            self._drop(self._hbm.frontier.coldest())
            self._totals.evicted += 1
        slots = self._hbm.open(count)
        turn.open.update(zip(range(turn.num_blocks, turn.num_blocks + count), slots, strict=True))
        turn.num_blocks += count
        return tuple(slots)

    def _drop(self, row: int) -> None:
        self._hbm.drop(row)
        self._rows.forget_unused(row)

    def _move_tip(self, turn: Turn, row: int) -> None:
        """Pin `row` in place of the turn's tip: the new one first, so that the chain is never unprotected."""
        if row != NO_ROW:
            self._hbm.pin(row)
        if turn.tip != NO_ROW:
            self._rows.touch(turn.tip, Kind.NORMAL, self._now)
            self._hbm.unpin(turn.tip)
        turn.tip = row

    def _release(self, turn: Turn) -> None:
        self._settle(turn)
        self._hbm.close(turn.open.values())
        turn.open.clear()
        turn.num_blocks = 0
        self._move_tip(turn, NO_ROW)
        del self._granted[turn.id]

    def _stop(self, turn: Turn) -> None:
        self._settle(turn)
        turn.state = TurnState.STOPPING

    def _settle(self, turn: Turn) -> None:
        turn.wanted = 0
        self._growers.pop(turn.id, None)

    def _forget_waiter(self, turn: Turn) -> None:
        self._queue.remove(turn)
        del self._turns[turn.id]

    def _has_room_to_run(self) -> bool:
        return len(self._granted) < self.config.max_running

    def _num_new_waiters(self) -> int:
        return sum(not turn.suspended for turn in self._queue)

    def _oldest(self) -> Turn | None:
        """The running turn that arrived first; it is never suspended."""
        running = (turn for turn in self._granted.values() if turn.state is TurnState.RUNNING)
        return min(running, key=lambda turn: turn.seq, default=None)

    # --- laws -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, saying what is wrong, unless all laws of the store hold. Linear in everything."""
        self._rows.check()
        live = list(self._rows)
        self._hbm.check(live)
        self._check_prefix_closed(live)
        self._check_turns(live)

    def _check_prefix_closed(self, live: list[int]) -> None:
        for row in live:
            parent = self._rows.parent[row]
            if self._hbm.is_valid(row) and parent != NO_ROW:
                assert self._hbm.is_valid(parent), f"row {row} is VALID in HBM and its parent {parent} is not"

    def _check_turns(self, live: list[int]) -> None:
        waiting, granted = list(self._queue), list(self._granted.values())
        assert {turn.id for turn in (*waiting, *granted)} == self._turns.keys(), "a turn is lost or counted twice"
        assert len(waiting) + len(granted) == len(self._turns), "a turn both waits and runs"
        assert len(granted) <= self.config.max_running, "more turns run than may"
        for turn in waiting:
            assert turn.state is TurnState.WAITING, f"queued turn {turn.id} is {turn.state.value}"
            assert turn.tip == NO_ROW, f"queued turn {turn.id} pins a block"
            assert not turn.open, f"queued turn {turn.id} holds slots"
        for turn in granted:
            self._check_granted(turn)
        open_slots = [slot for turn in granted for slot in turn.open.values()]
        assert len(open_slots) == self._hbm.num_open, f"{self._hbm.num_open} slots OPEN, turns own {len(open_slots)}"
        others = self._hbm.free_slots() | self._hbm.valid_slots(live)
        assert len({*open_slots, *others}) == len(open_slots) + len(others), "an OPEN slot has a second use"
        pins = sum(turn.tip != NO_ROW for turn in granted)
        assert self._hbm.num_pins(live) == pins, f"{self._hbm.num_pins(live)} pins for {pins} turns that pin"
        growers = {turn.id for turn in granted if turn.wanted}
        assert self._growers.keys() == growers, f"growers are {growers}"

    def _check_granted(self, turn: Turn) -> None:
        assert turn.state is not TurnState.WAITING, f"granted turn {turn.id} is waiting"
        row, in_rows = turn.tip, 0
        while row != NO_ROW:
            assert self._hbm.is_valid(row), f"turn {turn.id} attends to row {row}, which is not VALID"
            in_rows += self._rows.depth[row] not in turn.open
            row = self._rows.parent[row]
        total = in_rows + len(turn.open)
        assert total == turn.num_blocks, f"turn {turn.id} has {total} of {turn.num_blocks} blocks"
