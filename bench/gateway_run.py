"""What the gateway itself costs: CPU of the event loop for an SSE event, and how late the loop is meanwhile.

uvicorn, routes, turns, store and form as `dormouse serve` has them, with a stand-in for the engine. Clients read with
plain sockets in a process of their own, since on shared cores what they take would be counted as the server's. Counted
are the steps in which every stream gets a token: the loop thread's CPU between the first and the last of these, over
the events between them. What requests cost to begin and to end is the rest, told apart.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from app.gateway import Gateway
from app.hints import Hints
from app.keeper import Keeper
from app.metrics import Metrics
from app.names import ServedNames
from app.settings import Settings
from bench.errors import BenchFailed
from bench.gateway_engine import WORDS, StandInEngine
from bench.in_process import served, server_loop
from bench.step_client import Clients, clients
from kvstore.manager import TierManager
from kvstore.planner import Planner, PlannerConfig
from kvstore.reuse import MissReason
from kvstore.sessions import SessionBook
from models import embedded
from models.chat import ChatTemplate
from models.grammar import Grammars
from models.loader import GenerationDefaults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from bench.gateway_engine import Mark
    from kvstore.types import StepReport

NAME = "stand-in"
PROMPT = "Count as far as you can, and say each number once."
SPARE_BLOCKS = 8
LAG_EVERY_SECONDS = 0.005
GOAL_EVENT_SECONDS = 100e-6
GOAL_LAG_SECONDS = 0.020
"""p99; the project's own bars, both."""


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """What to measure."""

    streams: int = 256
    events_per_second: int = 3000
    """Over all streams."""
    tokens: int = 128
    """Of every answer."""
    repeats: int = 5

    @property
    def steps_per_second(self) -> float:
        return self.events_per_second / self.streams


@dataclass(slots=True)
class GatewaySamples:
    """An entry per repeat."""

    plan: GatewayPlan
    event_seconds: list[float] = field(default_factory=list)
    """CPU of the loop's thread for one event while all streams run."""
    request_seconds: list[float] = field(default_factory=list)
    """CPU of the loop's thread for one request to begin and to end: all that events did not take."""
    events_per_second: list[float] = field(default_factory=list)
    """As they were published."""
    merged_share: list[float] = field(default_factory=list)
    """Of all tokens, those that did not come in an event of their own."""
    lag_seconds: list[list[float]] = field(default_factory=list)
    """By which a timer of every 5 ms was late, while all streams ran."""


class LagWatch:
    """Keeps by how much a timer is late, with the time."""

    def __init__(self) -> None:
        self._lags: list[tuple[float, float]] = []
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin anew."""
        self._lags = []
        self._arm()

    def stop(self) -> list[tuple[float, float]]:
        """When and how late; nothing is kept from now on."""
        if self._handle is not None:
            self._handle.cancel()
        return self._lags

    def _arm(self) -> None:
        due = time.perf_counter() + LAG_EVERY_SECONDS
        self._handle = self._loop.call_later(LAG_EVERY_SECONDS, self._ring, due)

    def _ring(self, due: float) -> None:
        now = time.perf_counter()
        self._lags.append((now, max(0.0, now - due)))
        self._arm()


def run(plan: GatewayPlan, done: Callable[[str], None], profile: Path | None = None) -> GatewaySamples:
    """Carry out `plan`; with `profile`, cProfile's figures of the loop's thread go there, and times are not to be had.

    Raises:
        BenchFailed: an answer was not whole, or no step had all streams in it.
    """
    with server_loop() as runner:
        return runner.run(_measure(plan, done, profile))


async def _measure(plan: GatewayPlan, done: Callable[[str], None], profile: Path | None) -> GatewaySamples:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            nvme_dir=Path(folder),
            nvme_bytes=0,
            max_running=plan.streams,
            max_queue=4 * plan.streams,
            max_sessions=10**6,
        )
        profiler = cProfile.Profile() if profile is not None else None
        async with (
            _gateway(settings, plan) as (gateway, engine),
            served(settings, gateway) as (host, port),
            clients(host, port) as reading,
        ):
            bench = GatewayBench(gateway, engine, reading, plan)
            await bench.warm_up()
            if profiler is not None:
                profiler.enable()
            for number in range(plan.repeats):
                await bench.window()
                done(f"window {number + 1}")
            if profiler is not None and profile is not None:
                profiler.disable()
                profiler.dump_stats(profile)
            return bench.samples


class GatewayBench:
    """Runs windows on a served gateway."""

    def __init__(self, gateway: Gateway, engine: StandInEngine, reading: Clients, plan: GatewayPlan) -> None:
        self._gateway = gateway
        self._engine = engine
        self._reading = reading
        self._plan = plan
        self._lag = LagWatch()
        self.samples = GatewaySamples(plan)

    async def warm_up(self) -> None:
        """A window that is not kept."""
        await self._read(min(self._plan.streams, 16), 8)

    async def window(self) -> None:
        """All streams once, to their ends."""
        plan, samples = self._plan, self.samples
        self._gateway.manager.flush()
        gc.collect()
        marks = self._engine.watch(plan.streams)  # so that they begin together, however long requests take
        cpu_before = time.thread_time()
        self._lag.start()
        num_events = await self._read(plan.streams, plan.tokens)
        lags = self._lag.stop()
        cpu = time.thread_time() - cpu_before
        if len(marks.steps) < 2:
            raise BenchFailed("no two steps had all streams in them: raise --tokens, or lower --events-per-second")
        first, last = marks.steps[0], marks.steps[-1]
        of_token = _cpu_per_token(first, last, (len(marks.steps) - 1) * plan.streams)
        all_tokens = plan.streams * plan.tokens
        samples.request_seconds.append(max(0.0, cpu - of_token * all_tokens) / plan.streams)
        # Where some were merged, the others must not look cheaper for it.
        samples.event_seconds.append(of_token * all_tokens / num_events)
        samples.events_per_second.append((len(marks.steps) - 1) * plan.streams / (last.at - first.at))
        samples.merged_share.append(1 - num_events / all_tokens)
        samples.lag_seconds.append([late for at, late in lags if first.at <= at <= last.at])

    async def _read(self, streams: int, tokens: int) -> int:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return (await self._reading.window([body] * streams)).events


def _cpu_per_token(first: Mark, last: Mark, tokens: int) -> float:
    return (last.cpu_seconds - first.cpu_seconds) / tokens


@asynccontextmanager
async def _gateway(settings: Settings, plan: GatewayPlan) -> AsyncIterator[tuple[Gateway, StandInEngine]]:
    """The gateway of app.startup around a stand-in; its store has room for every stream and nothing below HBM."""
    from transformers import AutoTokenizer

    loop = asyncio.get_running_loop()
    folder = await asyncio.to_thread(embedded.fetch, settings.cache_dir)
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)  # type: ignore[assignment]
    token_ids = [tokenizer.encode(word, add_special_tokens=False)[0] for word in WORDS]
    slots = plan.streams * (-(-(plan.tokens + 100) // settings.block_tokens) + SPARE_BLOCKS)

    def on_step(report: StepReport) -> None:
        loop.call_soon_threadsafe(manager.step_ended, report)

    engine = StandInEngine(settings.block_tokens, plan.steps_per_second, token_ids, on_step, threading.get_ident())
    config = PlannerConfig(
        cost_gate="off",
        hbm_slots=slots,
        block_tokens=settings.block_tokens,
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        age_limit_seconds=settings.age_limit_seconds,
    )
    manager = TierManager(Planner(config), engine, max_context=slots * settings.block_tokens)
    metrics = Metrics(MissReason)
    metrics.watch_store(manager.snapshot)
    book = SessionBook(max_sessions=settings.max_sessions, max_branches=settings.session_branches)
    metrics.watch_sessions(book)
    metrics.watch_transfers({})
    with ThreadPoolExecutor(2, "text") as text_threads:
        gateway = Gateway(
            settings=settings,
            names=ServedNames(NAME, settings.served_model_name),
            model_key=b"stand-in-model-k",
            defaults=GenerationDefaults(),
            block_tokens=settings.block_tokens,
            block_bytes=4096,
            manager=manager,
            store=manager,
            keeper=Keeper(book, manager),
            hints=Hints(manager),
            chat=ChatTemplate(tokenizer),
            grammars=Grammars(tokenizer.backend_tokenizer, frozenset()),
            metrics=metrics,
            text_threads=text_threads,
            started_at=int(time.time()),
        )
        engine.open()
        try:
            yield gateway, engine
        finally:
            gateway.is_draining = True
            await manager.drain(1.0)
            gateway.keeper.close()
            await asyncio.to_thread(engine.close)
