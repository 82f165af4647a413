"""Random turns of many sessions, several at once: does each find its history?

Whichever session is next is drawn from those with turns left and none in flight. HBM holds fewer sessions than are in
flight, so turns wait, wake and are suspended.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from bench.errors import BenchFailed
from bench.tiers.rig import opened
from bench.tiers.sessions import QUESTION_TOKENS, Continuation, Shape, Texts, continuation

if TYPE_CHECKING:
    from bench.tiers.rig import Model, Rig

GOAL_SHARE = 0.995
"""Of storable blocks reused on later turns; the project's own bar."""


@dataclass(frozen=True, slots=True)
class ManyPlan:
    """What to measure."""

    sessions: int = 96
    tokens: int = 600
    """Of each first prompt."""
    turns: int = 3
    in_flight: int = 16
    hbm_sessions: int = 12
    """That HBM holds, whole."""
    answer_tokens: int = 16
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return self.sessions * self.turns


@dataclass(slots=True)
class ManySamples:
    """`first` and `later` have an entry per turn that did not fail."""

    plan: ManyPlan
    hbm_slots: int
    dram_slots: int
    slot_bytes: int
    first: list[Continuation] = field(default_factory=list)
    later: list[Continuation] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why turns failed; what was left of their sessions was not asked for."""
    seconds: float = 0.0
    totals: dict[str, int] = field(default_factory=dict)
    """What the store counted (kvstore.snapshot.Totals)."""

    @property
    def storable_blocks(self) -> int:
        return sum(each.storable_blocks for each in self.later)

    @property
    def reused_blocks(self) -> int:
        return sum(each.reused_blocks for each in self.later)

    @property
    def reused_share(self) -> float:
        """1.0 where nothing was storable."""
        return self.reused_blocks / self.storable_blocks if self.storable_blocks else 1.0


@dataclass(slots=True, eq=False)
class Session:
    """One that has turns left."""

    history: array[int]
    turns_left: int


class ManyBench:
    """Keeps turns in flight on one rig until no session has any left."""

    def __init__(self, rig: Rig, samples: ManySamples, texts: Texts, done: Callable[[str], None]) -> None:
        self._rig = rig
        self._samples = samples
        self._texts = texts
        self._done = done
        self._random = random.Random(samples.plan.seed)
        plan = samples.plan
        self._ready = [Session(array("I"), plan.turns) for _ in range(plan.sessions)]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._samples.plan.in_flight):
                tasks.create_task(self._keep_one_in_flight())

    async def _keep_one_in_flight(self) -> None:
        # Where all that have turns left are in flight, whoever runs them goes on with them.
        while self._ready:
            session = self._ready.pop(self._random.randrange(len(self._ready)))
            try:
                await self._turn(session)
            except BenchFailed as exc:
                self._samples.failures.append(str(exc))
                session.turns_left = 0
            if session.turns_left:
                self._ready.append(session)
            self._done(f"{len(self._samples.failures)} failed")

    async def _turn(self, session: Session) -> None:
        known, plan = len(session.history), self._samples.plan
        prompt = session.history + self._texts.draw(QUESTION_TOKENS if known else plan.tokens)
        turn = await self._rig.turn(prompt, plan.answer_tokens)
        (self._samples.later if known else self._samples.first).append(
            continuation(max(known, 1), turn, self._rig.model.layout.block_tokens)
        )
        session.history = turn.token_ids
        session.turns_left -= 1


async def measure(model: Model, plan: ManyPlan, done: Callable[[str], None]) -> ManySamples:
    """All turns of all sessions.

    Raises:
        BenchFailed: this machine has not that much memory. Turns that fail are counted.
    """
    blocks = Shape(plan.tokens, plan.turns, plan.answer_tokens).blocks(model.layout.block_tokens)
    samples = ManySamples(plan, plan.hbm_sessions * blocks, plan.sessions * blocks, model.layout.slot_bytes)
    async with opened(model, hbm_slots=samples.hbm_slots, dram_slots=samples.dram_slots) as rig:
        started = time.perf_counter()
        await ManyBench(rig, samples, Texts(model, plan.seed), done).run()
        samples.seconds = time.perf_counter() - started
        samples.totals = asdict(rig.manager.snapshot().totals)
    return samples
