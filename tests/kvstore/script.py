"""Scripts of events for the planner: short keys, short names, check() after every event.

Blocks hold 4 tokens. `keys("abc")` is the chain of three blocks named by their path: two
chains share what they share as text, so `keys("abx")` has the first two blocks of it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvstore.events import (
    BranchRecorded,
    Fill,
    ForgetBlocks,
    GrantTurn,
    GrowWanted,
    HurryTransfer,
    RecordBlocks,
    SleepWanted,
    SlotsErased,
    StartTransfer,
    StepEnded,
    SuspendTurn,
    TransferDone,
    TransferEnd,
    TurnArrived,
    TurnSettled,
    TurnStopped,
    WritePolicy,
)
from kvstore.planner import Planner, PlannerConfig
from kvstore.types import BlockKey, StopReason, Tier, TurnId

if TYPE_CHECKING:
    from kvstore.events import Action, Event
    from kvstore.types import TransferId, WakeId

BLOCK_TOKENS = 4


def keys(path: str) -> tuple[BlockKey, ...]:
    """The chain of `len(path)` blocks; equal prefixes of paths are equal blocks."""
    return tuple(BlockKey(blake2b(path[:end].encode(), digest_size=16).digest()) for end in range(1, len(path) + 1))


class Script:
    """A planner, a clock that stands until told otherwise, and the events of turns named by integers."""

    def __init__(
        self,
        hbm_slots: int = 8,
        max_running: int = 8,
        max_queue: int = 8,
        age_limit_seconds: float = 10.0,
        output_slice_tokens: int = 4,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.paths: dict[int, str] = {}
        self.copies: dict[TransferId, StartTransfer] = {}
        self.running: set[int] = set()
        self.catalogue: dict[int, BlockKey] = {}
        self.erasing: list[tuple[int, ...]] = []
        self.planner = Planner(
            PlannerConfig(
                hbm_slots=hbm_slots,
                block_tokens=BLOCK_TOKENS,
                max_running=max_running,
                max_queue=max_queue,
                age_limit_seconds=age_limit_seconds,
                output_slice_tokens=output_slice_tokens,
                **({"nvme_write_policy": WritePolicy.ON_PRESSURE} | more),
            )
        )

    def feed(self, event: Event) -> list[Action]:
        if isinstance(event, StepEnded):
            self.running.difference_update(stopped.turn for stopped in event.stopped)
        return self._checked(self.planner.handle(event, self.now))

    def arrive(
        self,
        turn: int,
        path: str,
        output_tokens: int = 4,
        priority: int = 0,
        cache: bool = True,
        wake: WakeId | None = None,
        to_nvme: bool = False,
        tenant: str = "",
    ) -> list[Action]:
        """A turn whose prompt is the blocks of `path` and one token more."""
        self.paths[turn] = path
        prompt_tokens = len(path) * BLOCK_TOKENS + 1
        chain = keys(path) if cache else ()
        return self.feed(
            TurnArrived(TurnId(turn), chain, prompt_tokens, output_tokens, priority, cache, wake, to_nvme, tenant)
        )

    def fills(self, turn: int, *indices: int, path: str | None = None) -> tuple[Fill, ...]:
        chain = keys(self.paths[turn] if path is None else path)
        return tuple(Fill(TurnId(turn), index, chain[index]) for index in indices)

    def fill(self, turn: int, *indices: int, path: str | None = None) -> list[Action]:
        return self.feed(StepEnded(self.fills(turn, *indices, path=path)))

    def stop(
        self, turn: int, reason: StopReason = StopReason.STOP, tokens: int | None = None, computed: int = 0
    ) -> list[Action]:
        tokens = len(self.paths[turn]) * BLOCK_TOKENS + 1 if tokens is None else tokens
        return self.feed(StepEnded((), (TurnStopped(TurnId(turn), reason, tokens, computed),)))

    def settle(self, turn: int) -> list[Action]:
        return self.feed(TurnSettled(TurnId(turn)))

    def grow(self, turn: int, slots: int = 1) -> list[Action]:
        return self.feed(GrowWanted(TurnId(turn), slots))

    def run(self, turn: int, path: str, tenant: str = "") -> None:
        """A whole turn that fills every block of `path` and stops."""
        actions = self.arrive(turn, path, tenant=tenant)
        if turn not in self.running:
            actions += self.end_all()
        cached = the_grant(actions).cached_tokens // BLOCK_TOKENS
        self.fill(turn, *range(cached, len(path)))
        self.stop(turn)

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self._checked(self.planner.handle_timeout(self.now))

    def end(
        self, transfer: TransferId, good: int | None = None, reason: TransferEnd = TransferEnd.DONE
    ) -> list[Action]:
        """A copy under way has ended; all of it well unless `good` says otherwise."""
        blocks = len(self.copies.pop(transfer).keys)
        return self.feed(TransferDone(transfer, blocks if good is None else good, reason))

    def end_all(self) -> list[Action]:
        """Every copy under way ends well, in order, and those that start meanwhile; all actions that follow."""
        actions: list[Action] = []
        while self.copies:
            actions += self.end(next(iter(self.copies)))
        return actions

    def put_to_sleep(self, path: str) -> None:
        """Compute `path` in a turn and move it to DRAM."""
        self.run(1_000 + len(self.paths), path)
        self.feed(SleepWanted(keys(path)))
        self.end_all()
        assert self.where(path) == ["D"] * len(path)

    def record(self, path: str, old: str | None = None, **wishes: Any) -> list[Action]:
        """The branch that was at the end of `old`, or a new one, is at the end of `path`."""
        superseded = () if old is None else tuple(key for key in keys(old) if key not in keys(path))
        return self.feed(BranchRecorded(keys(path)[-1], keys(old)[-1] if old else None, superseded, **wishes))

    def put_to_sleep_in_nvme(self, path: str) -> None:
        """Compute `path` in a turn, make it a branch and move it to NVMe."""
        self.run(1_000 + len(self.paths), path)
        self.record(path)
        self.feed(SleepWanted(keys(path), Tier.NVME))
        self.end_all()
        assert self.where(path) == ["N"] * len(path)

    def erase_all(self) -> list[Action]:
        """Whatever has to be erased on NVMe is."""
        actions: list[Action] = []
        while self.erasing:
            actions += self.feed(SlotsErased(self.erasing.pop(0)))
        return actions

    def where(self, path: str) -> list[str]:
        """For each block of `path` the initials of the tiers that hold it."""
        return ["".join(tier.name[0] for tier in tiers) for tiers in self.planner.locate(keys(path))]

    def slots(self, tier: Tier) -> dict[str, int]:
        """Slots of `tier` by state, those states left out that no slot is in."""
        counts = self.planner.snapshot().tier(tier)
        states = ("free", "open", "filling", "valid", "quarantined", "erasing", "pinned")
        return {state: getattr(counts, state) for state in states if getattr(counts, state)}

    def _checked(self, actions: list[Action]) -> list[Action]:
        self.planner.check()
        self.running.update(granted(actions))
        self.copies.update((action.transfer, action) for action in actions if isinstance(action, StartTransfer))
        for action in actions:
            self._note_nvme(action)
        assert self.catalogue == self.planner.on_nvme()
        return actions

    def _note_nvme(self, action: Action) -> None:
        """Keep the catalogue as the shell would."""
        match action:
            case RecordBlocks(blocks):
                for block in blocks:
                    assert self.catalogue.setdefault(block.slot, block.key) == block.key
            case ForgetBlocks(slots, erase):
                for slot in slots:
                    self.catalogue.pop(slot, None)
                if erase:
                    self.erasing.append(slots)
            case StartTransfer(target=Tier.NVME):
                in_use = {*self.catalogue, *(slot for slots in self.erasing for slot in slots)}
                assert not in_use & {*action.target_slots}

    def counts(self) -> dict[str, int]:
        """HBM slots by state."""
        hbm = self.planner.snapshot().tiers[0]
        return {"free": hbm.free, "open": hbm.open, "valid": hbm.valid, "pinned": hbm.pinned}

    def cached(self, path: str) -> int:
        """How many blocks of `path` a turn would be granted from the cache, told by a turn that comes and goes."""
        turn = 1_000_000 + len(self.paths)
        grants = [action for action in self.arrive(turn, path, output_tokens=0) if isinstance(action, GrantTurn)]
        self.stop(turn, StopReason.CANCELLED)
        return grants[0].cached_tokens // BLOCK_TOKENS


def granted(actions: list[Action]) -> list[int]:
    return [action.turn for action in actions if isinstance(action, GrantTurn)]


def the_grant(actions: list[Action]) -> GrantTurn:
    """The only grant among `actions`."""
    (grant,) = [action for action in actions if isinstance(action, GrantTurn)]
    return grant


def copies(actions: list[Action]) -> list[StartTransfer]:
    return [action for action in actions if isinstance(action, StartTransfer)]


def hurried(actions: list[Action]) -> list[TransferId]:
    return [action.transfer for action in actions if isinstance(action, HurryTransfer)]


def suspended(actions: list[Action]) -> list[int]:
    return [action.turn for action in actions if isinstance(action, SuspendTurn)]
