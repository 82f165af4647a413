"""A plain model of everything round the planner: memory that holds what was written, an engine, copies under way.

A block's content is the tuple of all tokens it was computed from, so what a slot *should*
hold is always known. Each slot of each tier holds what was last written to it; copies read
their source and write their target as late as they can, when they end, and write garbage
where they are not sound. So a slot reused too early, a copy published too early or a late
copy into a slot that has a new owner all show as a wrong content. NVMe outlives `crash`: what
is recorded of it is the catalogue that the next planner is told, and nothing that no branch allows
there may ever be written to it, or stay once its branches are closed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvstore.events import (
    AnswerWake,
    BlocksFound,
    BranchesFound,
    BranchRecorded,
    CancelTransfer,
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
    TransferEnd,
    TurnArrived,
    TurnCancelled,
    TurnSettled,
    TurnStopped,
    WakeCancelled,
    WakeHinted,
    WakeStatus,
    WritePolicyChanged,
)
from kvstore.planner import Planner
from kvstore.types import BlockKey, StopReason, Tier, TransferId, TurnId, WakeId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.config import PlannerConfig
    from kvstore.events import Action, Event, RecordedBlock

Content = tuple[int, ...]
GARBAGE: Content = (-1,)

ALPHABET = 10
"""Tokens of each tenant: those of tenant `i` are [i * ALPHABET, (i + 1) * ALPHABET), so no key is two tenants'."""


def tenant_of(content: Sequence[int]) -> int:
    return content[0] // ALPHABET


def name_of(content: Sequence[int]) -> str:
    """The first tenant is the one of those who have no key."""
    return f"tenant {tenant}" if (tenant := tenant_of(content)) else ""


def key(content: Content) -> BlockKey:
    return BlockKey(blake2b(repr(content).encode(), digest_size=16).digest())


@dataclass(eq=False)
class Client:
    """One turn as the engine and its client see it."""

    tokens: list[int]
    num_prompt: int
    num_output: int
    cache: bool
    to_nvme: bool
    state: str = "waiting"  # waiting, running, suspending, cancelling, at_limit
    has_run: bool = False
    table: list[int] = field(default_factory=list)
    computed: int = 0
    filled: int = 0
    wishes: bool = False


@dataclass(eq=False)
class Branch:
    """One branch as its session sees it."""

    content: Content
    to_nvme: bool


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
        self.branches: list[Branch] = []
        self.catalogue: dict[int, RecordedBlock] = {}
        self.erasing: list[tuple[int, ...]] = []
        self.probes: set[Tier] = set()
        self.seen: Counter[str] = Counter()
        self._unrecorded: list[Content] = []
        self._unsettled: dict[TurnId, Content] = {}  # of turns that ended well
        self._broken: set[int] = set()  # slots of NVMe that nobody can use, nor erase
        self._memory: dict[tuple[Tier, int], Content] = {}
        self._next_id = 0

    # --- what happens -----------------------------------------------------------------

    def arrive(
        self,
        tokens: Sequence[int],
        num_output: int,
        priority: int,
        cache: bool,
        hint: WakeId | None,
        to_nvme: bool = False,
    ) -> None:
        turn = self._new_id()
        self.clients[turn] = Client(list(tokens), len(tokens), num_output, cache, to_nvme)
        keys = self.keys(tokens) if cache else ()
        tenant = name_of(tokens)
        self._feed(TurnArrived(TurnId(turn), keys, len(tokens), num_output, priority, cache, hint, to_nvme, tenant))

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
        self._feed(StepEnded(tuple(fills), tuple(stops), seconds=1.0, prefill_tokens=32 * len(fills)))
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
            if copy.target is not Tier.NVME:
                self._memory[copy.target, target] = content if index < good else GARBAGE
                continue
            assert target not in self._slots_being_erased(), "a slot is written to before it is erased"
            self._memory[copy.target, target] = content if index < good else (*GARBAGE, *content)
        if reason is TransferEnd.SLOT_BROKEN and Tier.NVME in (copy.source, copy.target):
            self._broken.add((copy.target_slots if copy.target is Tier.NVME else copy.source_slots)[good])
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

    def record(self, branch: Branch | None, content: Content, to_nvme: bool, **wishes: Any) -> None:
        """A branch, or a new one, is now at `content`; what it does not share with what it was is superseded."""
        new, old = self.keys(content), self.keys(branch.content) if branch is not None else ()
        if branch is not None:
            branch.content, to_nvme = content, branch.to_nvme
        else:
            self.branches.append(Branch(content, to_nvme))
        superseded = tuple(name for name in old if name not in new)
        tip, old_tip = (new[-1] if new else None), (old[-1] if old else None)
        self._feed(BranchRecorded(tip, old_tip, superseded, to_nvme=to_nvme, **wishes))

    def record_ended(self, to_nvme: bool) -> None:
        """Make branches of what has ended well since the last call, as sessions do."""
        ended, self._unrecorded = self._unrecorded, []
        for content in ended:
            own = [branch for branch in self.branches if content[: len(branch.content)] == branch.content]
            self.record(max(own, key=lambda branch: len(branch.content), default=None), content, to_nvme)
        while self._unsettled:
            self._feed(TurnSettled(self._unsettled.popitem()[0]))

    def close(self, branch: Branch) -> None:
        self.branches.remove(branch)
        keys = self.keys(branch.content)
        self._feed(SessionClosed(keys[-1:], (keys,)))

    def sleep(self, content: Content, target: Tier = Tier.DRAM) -> None:
        self._feed(SleepWanted(self.keys(content), target))

    def drain(self, seconds: float) -> None:
        self._feed(FlushDown(self.now + seconds))

    def erase(self) -> None:
        """The slots that have waited longest to be erased are."""
        slots = self.erasing.pop(0)
        for slot in slots:
            self._memory.pop((Tier.NVME, slot), None)
        self._feed(SlotsErased(slots))

    def answer_probe(self, health: TierHealth) -> None:
        self.set_health(next(iter(self.probes)), health)

    def crash(self) -> None:
        """The process ends without a word, and another one starts: sessions that may lie on NVMe are there again.

        What no catalogue knows is erased by that, and what it knows and no such session claims.
        """
        self.branches = [branch for branch in self.branches if branch.to_nvme]
        claimed = self._allowed_by_branches()
        self.catalogue = {slot: block for slot, block in self.catalogue.items() if block.key in claimed}
        self._memory = {at: it for at, it in self._memory.items() if at[0] is Tier.NVME and at[1] in self.catalogue}
        self.clients.clear()
        self.copies.clear()
        self.hints.clear()
        self.probes.clear()
        self.erasing.clear()
        self._unrecorded.clear()
        self._unsettled.clear()
        self.planner = Planner(self.config)
        if self.config.nvme_slots:
            found = [(it.key, it.parent, it.first_block, it.slot, self.now - 1.0) for it in self.catalogue.values()]
            owners = {
                it.key: name_of(self._memory[Tier.NVME, it.slot])
                for it in self.catalogue.values()
                if not it.first_block
            }
            self._feed(BlocksFound(found[::-1], owners))
        tips = [keys[-1] for branch in self.branches if (keys := self.keys(branch.content))]
        self._feed(BranchesFound([BranchRecorded(tip) for tip in tips]))

    def set_health(self, tier: Tier, health: TierHealth) -> None:
        self.probes.discard(tier)  # whoever says it, the question is answered
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
            if not self.clients and not self.copies and not self.hints:
                break
            self.step((64,))
            self.pass_time(0.1)
        assert not self.clients, f"{len(self.clients)} turns never end: {self.planner!r}"
        assert not self.hints, "a hint was never answered"
        self.record_ended(to_nvme=True)
        while self.branches:
            self.close(self.branches[0])
        while self.erasing or self.copies:
            for transfer in list(self.copies):
                self.end_copy(transfer, 0, TransferEnd.DONE)
            if self.erasing:
                self.erase()
        on_nvme = {slot for tier, slot in self._memory if tier is Tier.NVME}
        assert on_nvme <= self._broken, "something is left on NVMe of branches that were closed"
        snapshot = self.planner.snapshot()
        assert snapshot.transfers == 0
        for counts in snapshot.tiers:
            busy = counts.open + counts.filling + counts.quarantined + counts.pinned + counts.erasing
            assert busy == 0, counts

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
            client.tokens.append(tenant_of(client.tokens) * ALPHABET + turn % 2)
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
            self._unrecorded.append(tuple(client.tokens))
            self._unsettled[stop.turn] = tuple(client.tokens) if client.to_nvme else ()
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
                    if action.target is Tier.NVME:
                        self._check_sinks(action)
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
                case RecordBlocks():
                    for block in action.blocks:
                        assert block.slot not in self.catalogue, "a slot is recorded twice"
                        self.catalogue[block.slot] = block
                        content = self._memory[Tier.NVME, block.slot]
                        assert key(content) == block.key, "a block is recorded that is not there"
                        assert len(content) == (block.first_block + 1) * self.config.block_tokens
                        parent = content[: -self.config.block_tokens]
                        assert block.parent == (key(parent) if parent else None)
                case ForgetBlocks():
                    for slot in action.slots:
                        self.catalogue.pop(slot, None)
                    if action.erase:
                        self.erasing.append(action.slots)
                case ProbeTier():
                    assert action.tier not in self.probes, "a tier is asked again before it has answered"
                    self.probes.add(action.tier)
                case WritePolicyChanged():
                    pass
        told = {slot: block.key for slot, block in self.catalogue.items()}
        assert told == self.planner.on_nvme(), "the catalogue knows other blocks than NVMe has"
        self._check_contents()

    def _check_sinks(self, copy: StartTransfer) -> None:
        """Nothing goes to NVMe that no branch and no turn that waits allows there, or to a slot that is in use."""
        allowed = self._allowed_by_branches()
        for content in self._unsettled.values():
            allowed.update(self.keys([*content, 0]))
        for client in self.clients.values():
            if client.to_nvme and client.has_run:
                allowed.update(self.keys([*client.tokens, 0]))
        assert set(copy.keys) <= allowed, "a block goes to NVMe that must not"
        assert not self._slots_being_erased() & {*copy.target_slots}, "a slot is used again before it is erased"
        assert not self.catalogue.keys() & {*copy.target_slots}, "a slot is written to that the catalogue knows"

    def _allowed_by_branches(self) -> set[BlockKey]:
        return {name for branch in self.branches if branch.to_nvme for name in self.keys(branch.content)}

    def _slots_being_erased(self) -> set[int]:
        return {slot for slots in self.erasing for slot in slots}

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
