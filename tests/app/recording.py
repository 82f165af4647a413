"""A store of sleeping sessions that holds no bytes: notes what it is told and answers as a test wants.

It counts the branches of each tip as the planner does, so that a test can hold it against the book.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.events import WakeStatus
from kvstore.types import BlockKey, Tier, WakeId

if TYPE_CHECKING:
    from kvstore.events import BranchRecorded
    from kvstore.sessions import SessionBook

BLOCK_TOKENS = 16


class RecordedWake:
    """A hint; `settle` says what became of it."""

    def __init__(self, wake: WakeId, keys: tuple[BlockKey, ...], target: Tier, hold: float, status: WakeStatus) -> None:
        self.id = wake
        self.keys = keys
        self.target = target
        self.hold_seconds = hold
        self.status = status
        self.tokens = len(keys) * BLOCK_TOKENS if status in (WakeStatus.AWAKE, WakeStatus.WAKING) else 0
        self.origin = Tier.DRAM
        self.is_cancelled = False
        self._settled = asyncio.Event()
        if status is not WakeStatus.WAKING:
            self._settled.set()

    def settle(self, status: WakeStatus) -> None:
        self.status = status
        self._settled.set()

    async def settled(self) -> object:
        return await self._settled.wait()

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.status is WakeStatus.WAKING:
            self.settle(WakeStatus.CANCELLED)


class RecordingStore:
    """`answer` is what hints are told at first."""

    def __init__(self) -> None:
        self.answer = WakeStatus.AWAKE
        self.recorded: list[BranchRecorded] = []
        self.closed: list[BlockKey] = []
        self.wakes: list[RecordedWake] = []
        self.slept: list[tuple[BlockKey, ...]] = []
        self.tips: Counter[BlockKey] = Counter()
        self._ids = itertools.count(1)

    def wake(self, keys: tuple[BlockKey, ...], target: Tier, hold_seconds: float) -> RecordedWake:
        wake = RecordedWake(WakeId(next(self._ids)), keys, target, hold_seconds, self.answer)
        self.wakes.append(wake)
        return wake

    async def sleep(self, keys: tuple[BlockKey, ...], target: Tier) -> int:
        assert target is not Tier.HBM
        self.slept.append(keys)
        return len(keys) * BLOCK_TOKENS

    def record_branch(self, event: BranchRecorded) -> None:
        self.recorded.append(event)
        if event.tip is not None:
            self.tips[event.tip] += 1
        if event.old_tip is not None:
            self._leave(event.old_tip)

    def take_over_branches(self, branches: Sequence[BranchRecorded]) -> None:
        for event in branches:
            self.record_branch(event)

    def forget(self, tips: tuple[BlockKey, ...], chains: tuple[tuple[BlockKey, ...], ...] = ()) -> None:
        assert [chain[-1] for chain in chains] == list(tips), "what an earlier process left is found by its chain"
        for tip in tips:
            self._leave(tip)
        self.closed += tips

    def blocks_by_tier(self, keys: Sequence[BlockKey]) -> Mapping[Tier, int]:
        return {Tier.DRAM: len(keys), Tier.HBM: len(keys) // 2}

    def _leave(self, tip: BlockKey) -> None:
        assert self.tips[tip] > 0, "a branch left that had never come"
        self.tips[tip] -= 1

    def check_in_step_with(self, book: SessionBook) -> None:
        """Every branch the book remembers is a branch here, and no other."""
        remembered = (each for session in book.recent(0, len(book)) for each in session.branches.values())
        assert +self.tips == Counter(branch.tip for branch in remembered if branch.tip is not None)
