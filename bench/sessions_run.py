"""Runs of `bench sessions`: against a server that is there, or against ones with budgets in sessions.

A budget needs the model's bytes per block and a whole session's tokens, which a small server is asked for first; it
also tells how fast this machine computes, and so how long the run will take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bench import lengths
from bench.client import ChatServer, connect, first_model, server_state
from bench.machine import load_average
from bench.progress import progress
from bench.server import serving
from bench.sessions import SessionsBench, SessionsPlan, SessionsSamples
from bench.words import Prompts, next_turn
from kvstore.tiers.nvme import stride_bytes

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from bench.lengths import Length

Result = TypeVar("Result")

PROBE_FLAGS = ("--hbm-bytes", "512MiB", "--dram-bytes", "0", "--nvme-bytes", "0")
SPARE_SHARE = 0.1
"""Of NVMe's budget, so that it bounds nothing."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server told of itself."""

    block_tokens: int
    block_bytes: int
    """Block of one token and no bytes: the server tells nothing of them, so it is no Dormouse."""
    length: Length
    added_tokens: int
    """By a next turn's question and its template."""
    tokens_per_second: float
    """Computed in one turn, its answer included."""

    def blocks(self, plan: SessionsPlan) -> int:
        """Of a whole session, its partial last one included."""
        longest = plan.prompt_tokens + plan.turns * plan.tokens + (plan.turns - 1) * self.added_tokens
        return -(-longest // self.block_tokens)

    def flags(self, plan: SessionsPlan) -> list[str]:
        """Budgets for `dormouse serve`: NVMe holds all sessions."""
        blocks = self.blocks(plan)
        on_disk = plan.sessions * blocks * stride_bytes(self.block_bytes)
        return [
            *("--hbm-bytes", str(plan.hbm_for * blocks * self.block_bytes)),
            *("--dram-bytes", str(plan.dram_for * blocks * self.block_bytes)),
            *("--nvme-bytes", str(round(on_disk * (1 + SPARE_SHARE)))),
        ]

    def estimated_seconds(self, plan: SessionsPlan, *, reuses: bool) -> float:
        """Of a run in which later turns compute their tail only, or all of their history again."""
        first = plan.prompt_tokens + plan.tokens
        grows = self.added_tokens + plan.tokens
        tail = self.block_tokens // 2
        later = [grows + (tail if reuses else first + (turn - 1) * grows) for turn in range(1, plan.turns)]
        return plan.sessions * (first + sum(later)) / self.tokens_per_second


def against(
    url: str, model: str | None, api_key: str | None, plan: SessionsPlan, tell: Callable[[str], None]
) -> Iterator[SessionsSamples]:
    """One run against the server at `url`, as it is."""

    async def ask(server: ChatServer, http: httpx.AsyncClient) -> Probe:
        return await _probe(server, http, plan)

    probe = _on(url, model, api_key, ask)
    tell(f"about {_minutes(probe.estimated_seconds(plan, reuses=True))} where all is reused")
    yield _run(url, model, api_key, plan, probe, "as served", [])


def served(
    plan: SessionsPlan, flags: Sequence[str], place: Path | None, tell: Callable[[str], None], *, with_baseline: bool
) -> Iterator[SessionsSamples]:
    """A run with all tiers and, if wanted, one with HBM only; each has a server of its own."""

    async def ask(server: ChatServer, http: httpx.AsyncClient) -> Probe:
        return await _probe(server, http, plan)

    with serving([*flags, *PROBE_FLAGS], place) as server:
        probe = _on(server.url, None, None, ask)
    budgets = [*probe.flags(plan), *flags]
    runs = {"with all tiers": budgets}
    if with_baseline:
        runs["DRAM and NVMe off"] = [*budgets, "--dram-bytes", "0", "--nvme-bytes", "0"]
    for title, run_flags in runs.items():
        seconds = probe.estimated_seconds(plan, reuses=run_flags is budgets)
        tell(f"{title}: about {_minutes(seconds)} at {probe.tokens_per_second:,.0f} tokens/s, as one turn alone has")
        with serving(run_flags, place) as server:
            yield _run(server.url, None, None, plan, probe, title, run_flags)


def _run(
    url: str,
    model: str | None,
    api_key: str | None,
    plan: SessionsPlan,
    probe: Probe,
    title: str,
    flags: list[str],
) -> SessionsSamples:
    async def measure(server: ChatServer, http: httpx.AsyncClient) -> SessionsSamples:
        samples = SessionsSamples(title, server.model, plan, probe.block_tokens, flags)
        before = load_average()
        with progress(title, plan.num_rounds) as done:
            await SessionsBench(server, samples, probe.length.words_for(plan.prompt_tokens), done).run()
        samples.load_averages = (before, load_average())
        return samples

    return _on(url, model, api_key, measure)


def _on(
    url: str,
    model: str | None,
    api_key: str | None,
    do: Callable[[ChatServer, httpx.AsyncClient], Awaitable[Result]],
) -> Result:
    async def connected() -> Result:
        async with connect(url, api_key) as http:
            return await do(ChatServer(http, model or await first_model(http)), http)

    return asyncio.run(connected())


async def _probe(server: ChatServer, http: httpx.AsyncClient, plan: SessionsPlan) -> Probe:
    state = await server_state(http)
    # Prompts of another seed than the run's: they must not be there already.
    prompts = Prompts(plan.seed + 1)
    length = await lengths.probe(server, prompts)
    messages = prompts.draw(length.words_for(plan.prompt_tokens))
    started = time.perf_counter()
    reply = await server.answer(messages, plan.tokens)
    seconds = time.perf_counter() - started
    following = await server.answer(next_turn(messages, reply.text, prompts.text(plan.later_words)), plan.tokens)
    computed = reply.prompt_tokens + reply.output_tokens
    return Probe(
        block_tokens=int(state.get("block_tokens", 1)),
        block_bytes=int(state.get("block_bytes", 0)),
        length=length,
        added_tokens=following.prompt_tokens - computed,
        tokens_per_second=computed / seconds,
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
