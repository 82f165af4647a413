"""The asyncio shell of the store: inbox, planner, timer, leases, drain.

It owns the only clock. Everything here runs on the event loop; there is no await between
reading planner state and writing it. The planner decides, this module carries out: it calls
the engine, wakes waiters, and turns the engine's reports into the planner's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, assert_never

from kvstore import chain
from kvstore.errors import ContextTooLong, QueueFull, ShuttingDown
from kvstore.events import (
    Action,
    AnswerWake,
    BlocksFound,
    BranchesFound,
    BranchRecorded,
    CancelTransfer,
    Event,
    Fill,
    FlushDown,
    FlushWanted,
    ForgetBlocks,
    GrantSlots,
    GrantTurn,
    GrowWanted,
    HurryTransfer,
    ProbeTier,
    RecordBlocks,
    Refusal,
    RefuseGrowth,
    RefuseTurn,
    SessionClosed,
    SleepWanted,
    SlotsErased,
    StartTransfer,
    StepEnded,
    SuspendTurn,
    TierHealth,
    TierHealthChanged,
    TransferDone,
    TurnArrived,
    TurnCancelled,
    TurnSettled,
    TurnStopped,
    WakeCancelled,
    WakeHinted,
    WakeStatus,
    WritePolicyChanged,
)
from kvstore.journal import NullJournal
from kvstore.lease import Grant, Lease
from kvstore.pending_wake import PendingWake
from kvstore.types import StopReason, Tier, TurnId, TurnProgress, WakeId

if TYPE_CHECKING:
    from kvstore.events import FoundBlock
    from kvstore.journal import BlockJournal
    from kvstore.lease import WakeTrigger
    from kvstore.planner import Planner
    from kvstore.snapshot import Snapshot
    from kvstore.types import BlockKey, StepReport, TransferId, TurnEngine, TurnSpec

log = logging.getLogger(__name__)

MOST_REMEMBERED_WAKES = 4096
"""A turn follows its wake within milliseconds; hints that no turn follows must not pile up."""


class Mover(Protocol):
    """Performs transfers (transfer.py). `done` comes later on the event loop, once per start."""

    def start(self, action: StartTransfer, done: Callable[[TransferDone], None]) -> None: ...

    def cancel(self, transfer: TransferId) -> None: ...

    def hurry(self, transfer: TransferId) -> None: ...


class Prober(Protocol):
    """Finds out whether a tier works again."""

    def probe(self, tier: Tier, done: Callable[[TierHealth], None]) -> None:
        """Returns at once; `done` is called on the event loop, later, or never by a tier that still hangs."""


class _NoProber:
    """For tiers that are asked nothing: the next reads will tell."""

    def probe(self, tier: Tier, done: Callable[[TierHealth], None]) -> None:
        asyncio.get_running_loop().call_soon(done, TierHealth.OK)


class _Turn:
    """One turn on this side of the planner: its exact tokens, their keys, and who waits for it."""

    def __init__(self, turn: TurnId, spec: TurnSpec, block_tokens: int, arrived: float) -> None:
        self.id = turn
        self.spec = spec
        self.arrived = arrived
        self.tokens = array("I", spec.token_ids)
        self.most_tokens = len(self.tokens) + spec.max_new_tokens
        self.num_blocks = 0
        self.wants_slots = False
        self.is_running = False  # granted, and no report said that it stopped or was suspended
        self.is_cancelled = False
        self.granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self.lease: Lease | None = None
        self._block_tokens = block_tokens
        cacheable = self.tokens[: len(self.tokens) - 1]
        self.keys: list[BlockKey] = []
        if spec.cache:
            self.keys = chain.extend(None, cacheable, block_tokens, spec.namespace)
        self.num_prompt_keys = len(self.keys)
        self.num_filled = 0

    def fills_up_to(self, computed_tokens: int) -> list[Fill]:
        """Fills of the blocks that became full since the last call."""
        full = computed_tokens // self._block_tokens
        fills: list[Fill] = []
        if self.spec.cache and full > self.num_filled:
            known = len(self.keys)
            if full > known:
                fresh = self.tokens[known * self._block_tokens : full * self._block_tokens]
                parent = self.keys[-1] if self.keys else None
                self.keys += chain.extend(parent, fresh, self._block_tokens, self.spec.namespace)
            fills = [Fill(self.id, index, self.keys[index]) for index in range(self.num_filled, full)]
        self.num_filled = max(self.num_filled, full)
        return fills

    def slots_wanted(self, slice_blocks: int) -> int:
        """Slots to ask for before the turn runs out of room: one block ahead of what it writes next."""
        room = self.num_blocks * self._block_tokens
        if self.wants_slots or len(self.tokens) + self._block_tokens <= room or room >= self.most_tokens:
            return 0
        missing = -(-(self.most_tokens - room) // self._block_tokens)
        return min(slice_blocks, missing)


class TierManager:
    """Admits turns, keeps their slots, and lets go of them. One per process, on one event loop."""

    def __init__(
        self,
        planner: Planner,
        engine: TurnEngine,
        *,
        max_context: int,
        mover: Mover | None = None,
        journal: BlockJournal | None = None,
        prober: Prober | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_context = max_context
        self._planner = planner
        self._engine = engine
        self._clock = clock
        self._mover = mover
        self._journal = journal or NullJournal()
        self._prober = prober or _NoProber()
        self._wakes: dict[WakeId, PendingWake] = {}
        self._wake_ids = itertools.count(1)
        self._found_awake: dict[WakeId, None] = {}  # wakes that had nothing left to bring, oldest first
        self._decided = asyncio.Event()  # set and replaced after every event while somebody waits for it
        self._num_watching = 0
        self._turns: dict[TurnId, _Turn] = {}
        self._unsettled: set[TurnId] = set()  # ended by themselves, and their leases are still open
        self._ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn_seconds = 1.0  # running mean of a turn, for Retry-After

    def __repr__(self) -> str:
        return f"<TierManager {self._planner!r}>"

    # --- for the HTTP layer ---------------------------------------------------------------

    async def acquire(self, spec: TurnSpec) -> Lease:
        """Wait until the turn is granted and running.

        Cancelling the wait withdraws the turn.

        Raises:
            ContextTooLong: the prompt and one token more can never fit.
            QueueFull: too many turns wait.
            ShuttingDown: the server drains.
        """
        if self._is_draining:
            raise ShuttingDown
        num_prompt = len(spec.token_ids)
        if num_prompt + 1 > self.max_context:
            raise ContextTooLong(num_prompt, self.max_context)
        turn = _Turn(TurnId(next(self._ids)), spec, self._planner.config.block_tokens, self._clock())
        turn.most_tokens = min(turn.most_tokens, self.max_context)
        self._turns[turn.id] = turn
        self._idle.clear()
        self._post(
            TurnArrived(
                turn=turn.id,
                keys=tuple(turn.keys),
                prompt_tokens=num_prompt,
                output_tokens=turn.most_tokens - num_prompt,
                priority=spec.priority,
                cache=spec.cache,
                wake=spec.wake,
                to_nvme=spec.to_nvme,
                tenant=spec.tenant,
            )
        )
        try:
            return await turn.granted
        except asyncio.CancelledError:
            self._cancel(turn.id)
            raise

    async def drain(self, seconds: float, progress: Callable[[int], None] | None = None) -> None:
        """Refuse new turns and waiting ones, let running ones finish; after `seconds` cancel what is left of them.

        Meanwhile, and with what is left of the time, what is not on NVMe and should be is copied there.
        `progress` is told how many blocks are still to be copied whenever that has changed.
        """
        self._is_draining = True
        deadline = self._clock() + seconds
        for turn in list(self._turns.values()):
            if turn.lease is None:
                self._cancel(turn.id)
                if not turn.granted.done():
                    turn.granted.set_exception(ShuttingDown())
        self._post(FlushDown(deadline))
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
                await self._sunk(progress)
        except TimeoutError:
            if self._turns:
                log.warning("cancelling %d turns that did not finish within %.0f s", len(self._turns), seconds)
            for turn_id in list(self._turns):
                self._cancel(turn_id)
            await self._idle.wait()
        if left := self._planner.snapshot().dirty_blocks:
            log.warning("%d blocks did not get to NVMe: their sessions compute them again", left)

    async def flush_down(self, seconds: float, progress: Callable[[int], None] | None = None) -> int:
        """Copy to NVMe what should be there and is not, for `seconds` at most; blocks that still are not."""
        self._post(FlushDown(self._clock() + seconds))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sunk(progress)
        return self._planner.snapshot().dirty_blocks

    async def _sunk(self, progress: Callable[[int], None] | None) -> None:
        """Wait until nothing is on its way to NVMe, or to be copied there."""
        told = 0
        await asyncio.sleep(0)  # whoever waited for the last turn records its branch first
        self._num_watching += 1
        try:
            while (left := self._planner.snapshot().sinking_blocks) > 0:
                if progress is not None and left != told:
                    progress(left)
                told = left
                await self._decided.wait()
        finally:
            self._num_watching -= 1

    def wake(self, keys: Sequence[BlockKey], target: Tier, hold_seconds: float) -> PendingWake:
        """Bring the chain of `keys` up to `target`, as far as there is room; what it became stands in the result."""
        pending = PendingWake(WakeId(next(self._wake_ids)), lambda wake: self._post(WakeCancelled(wake)))
        self._wakes[pending.id] = pending
        self._post(WakeHinted(pending.id, tuple(keys), target, hold_seconds))
        return pending

    async def sleep(self, keys: Sequence[BlockKey], target: Tier = Tier.DRAM) -> int:
        """Move the chain of `keys` down to `target` as far as nobody needs it above; tokens that are not above it then.

        Cancelling the wait takes nothing back: copies under way end, and what they freed stays free.
        """
        self._post(SleepWanted(tuple(keys), target))
        self._num_watching += 1
        try:
            while self._planner.are_falling_asleep(keys):
                await self._decided.wait()
        finally:
            self._num_watching -= 1
        asleep = sum(bool(tiers) and tiers[0] >= target for tiers in self._planner.locate(keys))
        return asleep * self._planner.config.block_tokens

    def blocks_by_tier(self, keys: Sequence[BlockKey]) -> dict[Tier, int]:
        """How many blocks of the chain of `keys` each tier has a copy of."""
        counts = {counts.tier: 0 for counts in self._planner.snapshot().tiers}
        for tiers in self._planner.locate(keys):
            for tier in tiers:
                counts[tier] += 1
        return counts

    def take_over_branches(self, branches: Sequence[BranchRecorded]) -> None:
        """Tell which chains an earlier process left behind, each as its last turn did; before any turn of this one."""
        self._post(BranchesFound(branches))

    def record_branch(self, event: BranchRecorded) -> None:
        """Tell which chain a completed turn left behind, and what its client wants of it."""
        self._post(event)

    def forget(self, tips: Sequence[BlockKey], chains: Sequence[Sequence[BlockKey]] = ()) -> None:
        """Drop what only the branches that end in `tips` have, from every tier.

        Without `chains`, all their keys, something may stay on NVMe (kvstore.events.SessionClosed).
        """
        self._post(SessionClosed(tuple(tips), tuple(map(tuple, chains))))

    def take_over(self, blocks: Sequence[FoundBlock], owners: Mapping[BlockKey, str] | None = None) -> None:
        """Tell what an earlier process left on NVMe, and whose chains begin with which block; before anything else."""
        self._post(BlocksFound(blocks, owners or {}))

    def set_health(self, tier: Tier, health: TierHealth) -> None:
        """Tell how `tier` does, from somebody who knows."""
        self._post(TierHealthChanged(tier, health))

    def flush(self) -> None:
        """Drop every cached block that no running turn needs."""
        self._post(FlushWanted())

    def snapshot(self) -> Snapshot:
        """Counters of tiers and turns as of now."""
        return self._planner.snapshot()

    def check(self) -> None:
        """Raise AssertionError unless all laws of the store hold; linear in everything, for tests."""
        self._planner.check()

    # --- from the engine --------------------------------------------------------------------

    def step_ended(self, report: StepReport) -> None:
        """Take one step's report; called on the event loop.

        The planner hears of fills before anyone hears of tokens, so that a follow-up turn finds
        the blocks.
        """
        fills: list[Fill] = []
        stopped: list[TurnStopped] = []
        for progress in report.progress:
            turn = self._turns[progress.turn]
            turn.tokens.extend(progress.new_token_ids)
            fresh = turn.fills_up_to(progress.computed_tokens)
            fills += fresh
            if turn.lease is not None:
                turn.lease.stored_tokens += len(fresh) * self._planner.config.block_tokens
            if progress.stopped is not None:
                stopped.append(TurnStopped(turn.id, progress.stopped, len(turn.tokens), progress.computed_tokens))
        self._post(
            StepEnded(
                tuple(fills),
                tuple(stopped),
                seconds=report.seconds,
                prefill_tokens=report.prefill_tokens,
                decode_tokens=report.decode_tokens,
            )
        )
        for progress in report.progress:
            self._after_step(self._turns[progress.turn], progress)

    def _after_step(self, turn: _Turn, progress: TurnProgress) -> None:
        assert turn.lease is not None
        if progress.stopped is StopReason.SUSPENDED and not turn.is_cancelled:
            turn.is_running = turn.wants_slots = False
            return
        if progress.stopped is None:
            self._grow(turn)
            if progress.new_token_ids or progress.text:
                turn.lease.deliver(progress)
            return
        if turn.is_cancelled:
            progress.stopped = StopReason.CANCELLED
        elif progress.stopped in (StopReason.STOP, StopReason.LENGTH):
            self._unsettled.add(turn.id)
        self._forget(turn)
        turn.lease.deliver(progress)

    def _grow(self, turn: _Turn) -> None:
        config = self._planner.config
        wanted = turn.slots_wanted(config.blocks_for(config.output_slice_tokens))
        if wanted:
            turn.wants_slots = True
            self._post(GrowWanted(turn.id, wanted))

    def _forget(self, turn: _Turn) -> None:
        del self._turns[turn.id]
        if turn.lease is not None:
            self._turn_seconds += 0.1 * (self._clock() - turn.arrived - self._turn_seconds)
            turn.lease.end()
        if not self._turns:
            self._idle.set()

    # --- the planner's actions ----------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._carry_out(self._planner.handle(event, self._clock()))

    def _on_timer(self) -> None:
        self._timer = None
        self._carry_out(self._planner.handle_timeout(self._clock()))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case GrantTurn():
                    self._on_granted(self._turns[action.turn], action)
                case GrantSlots(turn_id, slots):
                    turn = self._turns[turn_id]
                    turn.wants_slots = False
                    turn.num_blocks += len(slots)
                    self._engine.extend(turn_id, slots)
                case SuspendTurn(turn_id):
                    self._engine.stop(turn_id, StopReason.SUSPENDED)
                case RefuseGrowth(turn_id):
                    self._engine.stop(turn_id, StopReason.LENGTH)
                case RefuseTurn(turn_id, reason):
                    self._on_refused(self._turns[turn_id], reason)
                case StartTransfer():
                    assert self._mover is not None
                    self._mover.start(action, self._post)
                case CancelTransfer(transfer):
                    assert self._mover is not None
                    self._mover.cancel(transfer)
                case HurryTransfer(transfer):
                    assert self._mover is not None
                    self._mover.hurry(transfer)
                case AnswerWake():
                    self._on_wake_answered(action)
                case RecordBlocks(blocks):
                    self._journal.record(blocks)
                case ForgetBlocks(slots, erase):
                    self._forget_blocks(slots, erase)
                case ProbeTier(tier):
                    log.warning("%s does not answer in time; it is asked whether it works", tier.name)
                    self._prober.probe(tier, functools.partial(self.set_health, tier))
                case WritePolicyChanged(policy, written):
                    log.warning("%d bytes went to NVMe in 24 hours; blocks are written %s now", written, policy)
                case _:
                    assert_never(action)
        self._set_timer()
        if self._num_watching:
            decided, self._decided = self._decided, asyncio.Event()
            decided.set()

    def _forget_blocks(self, slots: tuple[int, ...], erase: bool) -> None:
        if erase:
            self._journal.erase(slots, lambda: self._post(SlotsErased(slots)))
        else:
            self._journal.forget(slots)

    def _on_wake_answered(self, action: AnswerWake) -> None:
        pending = self._wakes[action.wake]
        was_asked_now = pending.tokens == 0
        pending.answer(action)
        if was_asked_now and pending.status is WakeStatus.AWAKE:
            self._found_awake[action.wake] = None
            if len(self._found_awake) > MOST_REMEMBERED_WAKES:
                del self._found_awake[next(iter(self._found_awake))]
        if pending.is_settled:
            del self._wakes[action.wake]

    def _on_granted(self, turn: _Turn, action: GrantTurn) -> None:
        turn.is_running = True
        turn.num_blocks = len(action.slots)
        block = self._planner.config.block_tokens
        turn.num_filled = action.cached_tokens // block
        if action.resumed:
            self._engine.resume(turn.id, action.cached_tokens, action.slots)
            return
        grant = Grant(
            turn=turn.id,
            cached_tokens=action.cached_tokens,
            queue_seconds=max(0.0, self._clock() - turn.arrived - action.wake_seconds),
            reused={tier: blocks * block for tier, blocks in zip(Tier, action.reused_blocks, strict=True)},
            wake_seconds=action.wake_seconds,
            wake_trigger=self._trigger(turn.spec.wake, action),
            miss=action.miss,
        )
        turn.lease = Lease(grant, turn.tokens, lambda: self._cancel(turn.id))
        self._engine.start(turn.id, turn.spec, action.cached_tokens, action.slots)
        if not turn.granted.done():
            turn.granted.set_result(turn.lease)

    def _trigger(self, wake: WakeId | None, action: GrantTurn) -> WakeTrigger | None:
        """What set off the wake of the blocks a turn was granted with; None where none had slept."""
        was_awake = wake is not None and self._found_awake.pop(wake, 0) is None
        if not any(action.reused_blocks[Tier.DRAM :]):
            return None
        if was_awake:
            return "hint"  # somebody had brought them before the turn arrived, and no turn has used them since
        return "queue" if action.woken_from_queue else "arrival"

    def _on_refused(self, turn: _Turn, reason: str) -> None:
        self._forget(turn)
        if turn.granted.done():
            return
        if reason == Refusal.NEVER_FITS:
            turn.granted.set_exception(ContextTooLong(len(turn.tokens), self.max_context))
            return
        waiting = self._planner.snapshot().turns.waiting
        per_slot = self._turn_seconds / self._planner.config.max_running
        turn.granted.set_exception(QueueFull(waiting, max(1.0, waiting * per_slot)))

    def _cancel(self, turn_id: TurnId) -> None:
        """Stop a turn wherever it is; its slots come back when the engine says so, a waiter is forgotten at once.

        One that has ended is settled by that.
        """
        turn = self._turns.get(turn_id)
        if turn is None:
            if turn_id in self._unsettled:
                self._unsettled.remove(turn_id)
                self._post(TurnSettled(turn_id))
            return
        turn.is_cancelled = True
        self._engine.stop(turn_id, StopReason.CANCELLED)
        self._post(TurnCancelled(turn_id))
        if not turn.is_running:
            self._forget(turn)
            if turn.lease is not None:  # it ran before it was suspended
                turn.lease.deliver(TurnProgress(turn_id, 0, stopped=StopReason.CANCELLED))

    def _set_timer(self) -> None:
        due = self._planner.next_timeout()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)
