"""One key's flood beside another's turns: real queue, store and scheduler, an engine whose steps only take time.

The clock is virtual: a step costs what it computes. So the figures are counts, the same on every machine; what a real
server does is measured by `bench tenants`.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from app import tenants
from app.fair_queue import FairQueue
from app.tenants import Limits, Tenant
from kvstore import chain
from kvstore.manager import TierManager
from kvstore.planner import Planner, PlannerConfig
from kvstore.types import StepReport, StopReason, TurnId, TurnProgress, TurnSpec
from models.contention import Contention
from models.scheduler import schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

STEP_TOKENS = 512
STEP_SECONDS, TOKEN_SECONDS = 0.018, 0.0004
"""Of the embedded model on two cores: a step by itself, and each token in it."""

MAX_RUNNING = 16
TURNS, PROMPT, OUTPUT = 20, 300, 8
FLOOD_CLIENTS, FLOOD_PROMPT, FLOOD_OUTPUT = 24, 1_200, 24
CHECKED_STEPS = 25
"""The laws are checked after every so many steps: a check is linear in the blocks."""


@dataclass
class Computing:
    """One turn in the engine."""

    turn: TurnId
    tenant: str
    num_tokens: int
    most_tokens: int
    slots: int
    computed: int = 0

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.computed

    @property
    def num_writable(self) -> int:
        return self.slots * 32 - self.computed


class VirtualEngine:
    """Schedules as the engine does; `now` is what the steps so far have cost."""

    def __init__(self) -> None:
        self.now = 0.0
        self._turns: dict[TurnId, Computing] = {}
        self._suspended: dict[TurnId, Computing] = {}
        self._stopped: list[TurnProgress] = []
        self._contention = Contention()
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    async def until(self, moment: float) -> None:
        """Return once the steps have taken so long."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((moment, over))
        await over

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        most = len(spec.token_ids) + spec.max_new_tokens
        self._turns[turn] = Computing(turn, spec.tenant, len(spec.token_ids), most, len(slots), cached_tokens)

    def extend(self, turn: TurnId, slots: Sequence[int]) -> None:
        if turn in self._turns:
            self._turns[turn].slots += len(slots)

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        self._turns[turn] = it = self._suspended.pop(turn)
        it.computed, it.slots = cached_tokens, len(slots)

    def stop(self, turn: TurnId, reason: StopReason) -> None:
        it = self._turns.pop(turn, None)
        if it is None:
            return
        if reason is StopReason.SUSPENDED:
            self._suspended[turn] = it
        self._stopped.append(TurnProgress(turn, it.computed, stopped=reason))

    def step(self) -> StepReport:
        """Compute one step; takes virtual time even where there is nothing to do."""
        turns = list(self._turns.values())
        works = schedule(turns, STEP_TOKENS, self._contention)
        self.now += STEP_SECONDS + TOKEN_SECONDS * sum(work.num_tokens for work in works)
        for moment, over in self._sleeping:
            if moment <= self.now and not over.done():
                over.set_result(None)
        report = StepReport(self._stopped)
        self._stopped = []
        for place, count in works:
            it = turns[place]
            it.computed += count
            progress = TurnProgress(it.turn, it.computed)
            if not it.num_pending:
                it.num_tokens += 1
                progress.new_token_ids.append(7)
                if it.num_tokens == it.most_tokens:
                    progress.stopped = StopReason.LENGTH
                    del self._turns[it.turn]
            report.progress.append(progress)
        return report


async def first_token_seconds(with_flood: bool, hbm_slots: int) -> list[float]:
    """What each of bob's turns waited for its first token; he asks again a little after each answer."""
    engine = VirtualEngine()
    config = PlannerConfig(
        hbm_slots=hbm_slots, block_tokens=32, max_running=MAX_RUNNING, max_queue=100, age_limit_seconds=10.0
    )
    manager = TierManager(Planner(config), engine, max_context=4_096, clock=lambda: engine.now)
    queue = FairQueue(manager, max_queue=100, step_tokens=STEP_TOKENS, clock=lambda: engine.now)
    limits = Limits(max_running=MAX_RUNNING - MAX_RUNNING // 4, max_waiting=50)
    seconds: list[float] = []

    async def turn(who: Tenant, prompt: array[int], output: int, arrived: float) -> float:
        space = chain.namespace(b"model", who.name, None)
        lease = await queue.acquire(TurnSpec(prompt, output, space, payload=None, tenant=who.name))
        first = 0.0
        async for piece in lease.pieces():
            if piece.new_token_ids and not first:
                first = engine.now - arrived
        await lease.close()
        return first

    async def flood(client: int) -> None:
        who = Tenant("alice", limits)
        tenants.enter(who)
        for number in range(10**6):
            start = 1_000_000 + (client * 10**5 + number) * 10
            await turn(who, array("I", range(start, start + FLOOD_PROMPT)), FLOOD_OUTPUT, engine.now)

    async def ask() -> None:
        who = Tenant("bob", limits)
        tenants.enter(who)
        for number in range(TURNS):
            moment = engine.now + 0.7 + 0.013 * number  # not in step with anybody
            await engine.until(moment)
            start = number * 10**4
            seconds.append(await turn(who, array("I", range(start, start + PROMPT)), OUTPUT, moment))

    floods = [asyncio.create_task(flood(client)) for client in range(FLOOD_CLIENTS if with_flood else 0)]
    asking, steps = asyncio.create_task(ask()), 0
    while not asking.done():
        for _ in range(20):
            await asyncio.sleep(0)
        manager.step_ended(engine.step())
        steps += 1
        if steps % CHECKED_STEPS == 0:
            manager.check()
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    manager.step_ended(engine.step())
    manager.check()
    await asking
    return sorted(seconds)


@pytest.mark.parametrize("hbm_slots", [2_000, 400])
async def test_a_flood_leaves_anothers_p95_of_first_tokens_within_three_times_of_alone(hbm_slots: int) -> None:
    alone = await first_token_seconds(False, hbm_slots)
    beside = await first_token_seconds(True, hbm_slots)
    p95 = int(0.95 * TURNS) - 1
    assert beside[p95] <= 3 * alone[p95], (alone, beside)
    assert beside[TURNS // 2] <= 2.5 * alone[TURNS // 2]
