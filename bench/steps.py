"""What serving over HTTP costs the engine's steps: the event loop and the engine thread share one interpreter lock.

One process, one loaded model, one arena. Windows alternate, and the two windows of a pair compute the same prompts:

    http    uvicorn in this process streams to clients in another one, as `dormouse serve` does
    plain   the same turns taken straight from the store: acquire, read the pieces, close

Compared are the steps in which every stream gets one token and nothing is prefilled; the others depend on when
each request happened to arrive. The clients' own cycles are in the figure where server and clients share cores.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app import prompts, startup
from app.schema import ChatRequest
from bench.errors import BenchFailed
from bench.in_process import served, server_loop
from bench.lengths import length_by
from bench.stats import Ratio, p95_ratio
from bench.step_client import Clients, clients
from bench.words import Messages, Prompts

if TYPE_CHECKING:
    from app.gateway import Gateway
    from app.settings import Settings
    from kvstore.types import StepReport, TurnSpec


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to measure."""

    streams: int = 16
    prompt_tokens: int = 200
    tokens: int = 64
    """Tokens of each answer."""
    pairs: int = 8
    seed: int = 0


@dataclass(slots=True)
class Window:
    """The compared steps of one window."""

    seconds: list[float]
    """What each took on the engine thread: the forward pass, sampling, text."""
    mean_interval_seconds: float
    """From one to the next, so with what the engine does, or waits for, between them."""


@dataclass(slots=True)
class StepSamples:
    """Windows of both kinds; those of one index are a pair."""

    plan: StepPlan
    model: str
    http: list[Window] = field(default_factory=list)
    plain: list[Window] = field(default_factory=list)
    http_bytes: list[int] = field(default_factory=list)
    """Of all answers of a window."""

    def ratio(self) -> Ratio:
        """p95 with HTTP over p95 without."""
        return p95_ratio([(a.seconds, b.seconds) for a, b in zip(self.http, self.plain, strict=True)], self.plan.seed)


def all_seconds(windows: Sequence[Window]) -> list[float]:
    """Of every step in `windows`."""
    return [seconds for window in windows for seconds in window.seconds]


class StepLog:
    """Keeps the reports that the store is given."""

    def __init__(self) -> None:
        self._reports: list[tuple[float, StepReport]] = []

    def listen(self, gateway: Gateway) -> None:
        """Be told of every step from now on, on the event loop, before the store is."""
        told = gateway.manager.step_ended

        def step_ended(report: StepReport) -> None:
            self.note(report)
            told(report)

        # Start-up binds engine to store, and looks this name up at each step: no seam is needed there for our sake.
        setattr(gateway.manager, "step_ended", step_ended)  # noqa: B010 - to a type checker a method is no variable

    def note(self, report: StepReport) -> None:
        """Keep one report."""
        self._reports.append((time.perf_counter(), report))

    def take(self, streams: int) -> Window:
        """The steps since the last call that gave each of `streams` one token.

        Raises:
            BenchFailed: there were fewer than two.
        """
        reports = self._reports
        self._reports = []
        compared = [
            index
            for index, (_, report) in enumerate(reports)
            if (report.decode_tokens, report.prefill_tokens) == (streams, 0)
        ]
        if len(compared) < 2:
            raise BenchFailed(
                "no two steps had all streams in them: raise --tokens, or --hbm-bytes where they do not fit"
            )
        first, last = compared[0], compared[-1]
        interval = (reports[last][0] - reports[first][0]) / (last - first)
        return Window([reports[index][1].seconds for index in compared], interval)

    def clear(self) -> None:
        """Forget what happened between windows."""
        self._reports = []


class StepBench:
    """Runs one plan on a running gateway."""

    def __init__(self, gateway: Gateway, clients: Clients, plan: StepPlan) -> None:
        self._gateway = gateway
        self._clients = clients
        self._plan = plan
        self._prompts = Prompts(plan.seed)
        self._log = StepLog()
        self._log.listen(gateway)

    async def run(self, done: Callable[[str], None]) -> StepSamples:
        """Measure every pair; which of its windows comes first alternates.

        Raises:
            BenchFailed: a window had no step with all streams in it, or an answer failed.
        """
        plan = self._plan
        samples = StepSamples(plan, self._gateway.names.first)
        length = length_by(self._count)
        words = length.words_for(plan.prompt_tokens)
        for index in range(-1, plan.pairs):
            # The first pair warms up, at full length: with short answers the first stream ends before the last begins.
            requests = [self._request(self._prompts.draw(words), plan.tokens) for _ in range(plan.streams)]
            if index % 2:
                plain = await self._without(requests)
                http, num_bytes = await self._over_http(requests)
            else:
                http, num_bytes = await self._over_http(requests)
                plain = await self._without(requests)
            if index >= 0:
                samples.http.append(http)
                samples.plain.append(plain)
                samples.http_bytes.append(num_bytes)
                done(f"pair {index + 1}")
        return samples

    async def _over_http(self, requests: list[ChatRequest]) -> tuple[Window, int]:
        self._prepare()
        came = await self._clients.window([each.model_dump(mode="json", exclude_none=True) for each in requests])
        return self._log.take(self._plan.streams), came.bytes

    async def _without(self, requests: list[ChatRequest]) -> Window:
        specs = [self._spec(request) for request in requests]
        self._prepare()
        await asyncio.gather(*(self._turn(spec) for spec in specs))
        return self._log.take(self._plan.streams)

    def _prepare(self) -> None:
        """The second window of a pair finds nothing of the first, and pays for none of its garbage."""
        self._gateway.manager.flush()
        gc.collect()
        self._log.clear()

    async def _turn(self, spec: TurnSpec) -> None:
        lease = await self._gateway.manager.acquire(spec)
        try:
            async for piece in lease.pieces():
                if piece.error is not None:
                    raise BenchFailed(f"the engine failed: {piece.error}")
        finally:
            await lease.close()

    def _request(self, messages: Messages, tokens: int) -> ChatRequest:
        return ChatRequest.model_validate(
            {
                "model": self._gateway.names.first,
                "messages": messages,
                "max_tokens": tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
            }
        )

    def _spec(self, request: ChatRequest) -> TurnSpec:
        """What the HTTP side would ask of the store for `request`."""
        chat = self._gateway.chat
        rendered = chat.render([message.as_template() for message in request.messages])
        return prompts.spec_of(self._gateway, request, chat.encode(rendered).token_ids, priority=0, wake=None)

    def _count(self, num_words: int) -> int:
        return len(self._spec(self._request(self._prompts.draw(num_words), 1)).token_ids)


async def measure(settings: Settings, plan: StepPlan, done: Callable[[str], None]) -> StepSamples:
    """Load the model, serve it on a free loopback port, and run `plan`.

    Raises:
        BenchFailed: no figure came of it.
        SettingInvalid, ModelError: the server could not start.
    """
    async with (
        startup.opened(settings) as gateway,
        served(settings, gateway) as (host, port),
        clients(host, port) as reading,
    ):
        return await StepBench(gateway, reading, plan).run(done)


def run(settings: Settings, plan: StepPlan, done: Callable[[str], None]) -> StepSamples:
    """`measure` on the event loop that `dormouse serve` runs on."""
    with server_loop() as runner:
        return runner.run(measure(settings, plan, done))
