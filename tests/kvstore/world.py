"""A plain model of everything round the planner: memory that holds what was written, an engine, copies under way.

A block's content is the tuple of all tokens it was computed from, so what a slot *should*
hold is always known. Each slot of each tier holds what was last written to it; copies read
their source and write their target as late as they can, when they end, and write garbage
where they are not sound. So a slot reused too early, a copy published too early or a late
copy into a slot that has a new owner all show as a wrong content.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvstore.events import (
    AnswerWake,
    BranchRecorded,
    CancelTransfer,
    Fill,
    FlushWanted,
    GrantSlots,
    GrantTurn,
    GrowWanted,
    HurryTransfer,
    RefuseGrowth,
    RefuseTurn,
    SessionClosed,
    SleepWanted,
    StartTransfer,
    StepEnded,
    SuspendTurn,
    TierHealth,
    TierHealthChanged,
    TransferDone,
    TransferEnd,
    TurnArrived,
    TurnCancelled,
    TurnStopped,
    WakeCancelled,
    WakeHinted,
    WakeStatus,
)
from kvstore.planner import Planner
from kvstore.types import BlockKey, StopReason, Tier, TransferId, TurnId, WakeId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.config import PlannerConfig
    from kvstore.events import Action, Event

Content = tuple[int, ...]
GARBAGE: Content = (-1,)


def key(content: Content) -> BlockKey:
    return BlockKey(blake2b(repr(content).encode(), digest_size=16).digest())


@dataclass(eq=False)
class Client:
    """One turn as the engine and its client see it."""

    tokens: list[int]
    num_prompt: int
    num_output: int
    cache: bool
    state: str = "waiting"  # waiting, running, suspending, cancelling, at_limit
    has_run: bool = False
    table: list[int] = field(default_factory=list)
    computed: int = 0
    filled: int = 0
    wishes: bool = False


class World:
    """The planner in its world; `check` runs after every event."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.planner = Planner(config)
        self.now = 0.0
        self.clients: dict[int, Client] = {}
        self.copies: dict[TransferId, StartTransfer] = {}
        self.cancelled_copies: set[TransferId] = set()
        self.hints: set[WakeId] = set()
        self.histories: list[Content] = []  # of turns that ended well
        self.seen: Counter[str] = Counter()
        self._memory: dict[tuple[Tier, int], Content] = {}
        self._next_id = 0

    # --- what happens -----------------------------------------------------------------

    def arrive(self, tokens: Sequence[int], num_output: int, priority: int, cache: bool, hint: WakeId | None) -> None:
        turn = self._new_id()
        self.clients[turn] = Client(list(tokens), len(tokens), num_output, cache)
        keys = self.keys(tokens) if cache else ()
        self._feed(TurnArrived(TurnId(turn), keys, len(tokens), num_output, priority, cache, hint))

    def step(self, paces: Sequence[int]) -> None:
        """One engine step: running turn `i` computes up to `paces[i % len]` tokens; then those that want to, grow."""
        fills: list[Fill] = []
        stops: list[TurnStopped] = []
        for number, (turn, client) in enumerate(list(self.clients.items())):
            if client.state == "running":
                fills += self._compute(turn, client, paces[number % len(paces)])
            reason = self._stop_reason(client)
            if reason is not None:
                stops.append(TurnStopped(TurnId(turn), reason, len(client.tokens), client.computed))
        for stop in stops:
            self._stop(self.clients[stop.turn], stop)
        self._feed(StepEnded(tuple(fills), tuple(stops)))
        for turn, client in list(self.clients.items()):
            if client.state == "running" and not client.wishes and self._is_short_of_room(client):
                client.wishes = True
                self._feed(GrowWanted(TurnId(turn), 1 + turn % 3))

    def cancel(self, turn: int) -> None:
        client = self.clients[turn]
        if client.state == "waiting":
            del self.clients[turn]
        else:
            client.state = "cancelling"
        self._feed(TurnCancelled(TurnId(turn)))

    def end_copy(self, transfer: TransferId, good: int, reason: TransferEnd) -> None:
        copy = self.copies.pop(transfer)
        good = len(copy.source_slots) if reason is TransferEnd.DONE else min(good, len(copy.source_slots) - 1)
        for index, (source, target, name) in enumerate(
            zip(copy.source_slots, copy.target_slots, copy.keys, strict=True)
        ):
            content = self._memory[copy.source, source]
            assert name is None or key(content) == name, "a copy's source changed under it"
            self._memory[copy.target, target] = content if index < good else GARBAGE
        self._feed(TransferDone(transfer, good, reason))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._carry_out(self.planner.handle_timeout(self.now))

    def hint(self, content: Content, target: Tier, hold_seconds: float) -> None:
        wake = WakeId(self._new_id())
        self.hints.add(wake)
        self._feed(WakeHinted(wake, self.keys(content), target, hold_seconds))

    def cancel_hint(self, wake: WakeId) -> None:
        self._feed(WakeCancelled(wake))

    def record(self, content: Content, replaced: Content, keep_seconds: float, pinned: bool, final: bool) -> None:
        """The branch that ended at `replaced` is now at `content`; what they do not share is superseded."""
        new, old = self.keys(content), self.keys(replaced)
        superseded = tuple(name for name in old if name not in new)
        self._feed(
            BranchRecorded(new[-1] if new else None, old[-1] if old else None, superseded, keep_seconds, pinned, final)
        )

    def close(self, content: Content) -> None:
        self._feed(SessionClosed(self.keys(content)[-1:]))

    def sleep(self, content: Content) -> None:
        self._feed(SleepWanted(self.keys(content)))

    def set_health(self, tier: Tier, health: TierHealth) -> None:
        self._feed(TierHealthChanged(tier, health))

    def flush(self) -> None:
        self._feed(FlushWanted())

    def finish(self) -> None:
        """Let everything come to its end: every turn is answered, and nothing is left behind."""
        for tier in Tier:
            if tier < len(self.planner.snapshot().tiers):
                self.set_health(tier, TierHealth.OK)
        for _ in range(4_000):
            for transfer in list(self.copies):
                self.end_copy(transfer, 0, TransferEnd.DONE)
            if not self.clients and not self.copies:
                break
            self.step((64,))
            self.pass_time(0.1)
        assert not self.clients, f"{len(self.clients)} turns never end: {self.planner!r}"
        assert not self.hints, "a hint was never answered"
        snapshot = self.planner.snapshot()
        assert snapshot.transfers == 0
        for counts in snapshot.tiers:
            assert counts.open == counts.filling == counts.quarantined == counts.pinned == 0, counts

    def keys(self, tokens: Sequence[int]) -> tuple[BlockKey, ...]:
        width = self.config.block_tokens
        return tuple(key(tuple(tokens[: end * width])) for end in range(1, (len(tokens) - 1) // width + 1))

    # --- the engine -------------------------------------------------------------------

    def _compute(self, turn: int, client: Client, pace: int) -> Iterable[Fill]:
        width = self.config.block_tokens
        client.computed = min(len(client.tokens), client.computed + pace, len(client.table) * width)
        for index in range(client.filled, -(-client.computed // width)):
            end = min(client.computed, (index + 1) * width)
            self._memory[Tier.HBM, client.table[index]] = tuple(client.tokens[:end])
        if client.computed == len(client.tokens) < client.num_prompt + client.num_output:
            client.tokens.append(turn % 2)
        while (client.filled + 1) * width <= client.computed:
            client.filled += 1
            yield Fill(TurnId(turn), client.filled - 1, key(tuple(client.tokens[: client.filled * width])))

    def _is_done(self, client: Client) -> bool:
        return len(client.tokens) == client.num_prompt + client.num_output and client.computed >= client.num_prompt

    def _stop_reason(self, client: Client) -> StopReason | None:
        if client.state in ("running", "suspending") and client.has_run and self._is_done(client):
            return StopReason.LENGTH
        reasons = {
            "suspending": StopReason.SUSPENDED,
            "cancelling": StopReason.CANCELLED,
            "at_limit": StopReason.LENGTH,
        }
        return reasons.get(client.state)

    def _stop(self, client: Client, stop: TurnStopped) -> None:
        if stop.reason is StopReason.SUSPENDED:
            client.state, client.table, client.wishes = "waiting", [], False
            return
        if stop.reason is StopReason.LENGTH:
            self.histories.append(tuple(client.tokens))
        del self.clients[stop.turn]

    def _is_short_of_room(self, client: Client) -> bool:
        room = len(client.table) * self.config.block_tokens - client.computed
        return room <= 1 and not self._is_done(client)

    # --- the planner's answers --------------------------------------------------------

    def _feed(self, event: Event) -> None:
        self._carry_out(self.planner.handle(event, self.now))

    def _carry_out(self, actions: list[Action]) -> None:
        self.planner.check()
        for action in actions:
            self.seen[type(action).__name__] += 1
            match action:
                case GrantTurn():
                    self._granted(self.clients[action.turn], action)
                case GrantSlots():
                    client = self.clients[action.turn]
                    assert client.state == "running"
                    assert client.wishes
                    client.table += action.slots
                    client.wishes = False
                case SuspendTurn():
                    client = self.clients[action.turn]
                    assert client.state == "running"
                    client.state = "suspending"
                case RefuseGrowth():
                    client = self.clients[action.turn]
                    assert len(client.table) == self.config.hbm_slots, "growth was refused to a turn that had not all"
                    client.state = "at_limit"
                case RefuseTurn():
                    assert not self.clients.pop(action.turn).has_run
                case StartTransfer():
                    assert action.transfer not in self.copies
                    assert action.deadline > self.now
                    self.copies[action.transfer] = action
                case CancelTransfer():
                    assert action.transfer in self.copies
                    self.cancelled_copies.add(action.transfer)
                case HurryTransfer():
                    assert self.copies[action.transfer].source is Tier.HBM
                case AnswerWake():
                    assert action.wake in self.hints
                    if action.status is not WakeStatus.WAKING:
                        self.hints.remove(action.wake)
        self._check_contents()

    def _granted(self, client: Client, grant: GrantTurn) -> None:
        assert client.state == "waiting"
        assert grant.resumed == client.has_run
        assert client.cache or grant.resumed or not grant.cached_tokens
        assert grant.cached_tokens < len(client.tokens)
        if grant.resumed:
            self.seen["kept all" if grant.cached_tokens >= client.computed else "recomputed"] += 1
        client.state, client.has_run = "running", True
        client.table = list(grant.slots)
        client.computed = grant.cached_tokens
        client.filled = grant.cached_tokens // self.config.block_tokens
        self.seen["reused"] += sum(grant.reused_blocks)

    def _check_contents(self) -> None:
        """What a turn has computed or was granted is in its slots, and no slot it writes to is another's."""
        width = self.config.block_tokens
        writable: Counter[int] = Counter()
        for client in self.clients.values():
            if client.state == "waiting":
                continue
            for index in range(-(-client.computed // width)):
                end = min(client.computed, (index + 1) * width)
                content = self._memory.get((Tier.HBM, client.table[index]))
                assert content == tuple(client.tokens[:end]), f"block {index} holds {content}"
            writable.update(client.table[client.computed // width :])
        assert all(count == 1 for count in writable.values()), "two turns write to one slot"
        readable = {slot for client in self.clients.values() for slot in client.table[: client.computed // width]}
        assert not readable & writable.keys(), "one turn writes where another reads"

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
