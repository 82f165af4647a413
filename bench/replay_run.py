"""Rounds of `bench replay`, each with texts of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench import lengths, trace
from bench.client import ChatServer, connect, first_model, server_state
from bench.progress import progress
from bench.replay import Replay, ReplayPlan, ReplaySamples, num_sessions
from bench.words import Prompts

if TYPE_CHECKING:
    import httpx

    from bench.trace import Request


def run(url: str, model: str | None, api_key: str | None, plan: ReplayPlan) -> ReplaySamples:
    """Replay `plan` as often as it says.

    Raises:
        BenchFailed: there is no such trace or server; failed requests are counted.
    """
    whole = trace.shortened(trace.read(plan.trace), plan.length_scale, plan.max_context, plan.max_output)
    requests, time_scale = trace.paced(trace.thinned(whole, plan.requests, plan.seed), plan.requests_per_second)

    async def measure(done: Callable[[str], None]) -> ReplaySamples:
        async with connect(url, api_key) as http:
            server = ChatServer(http, model or await first_model(http))
            return await _rounds(server, http, plan, requests, time_scale, done)

    with progress("replay", plan.repeats * len(requests)) as done:
        return asyncio.run(measure(done))


async def _rounds(
    server: ChatServer,
    http: httpx.AsyncClient,
    plan: ReplayPlan,
    requests: list[Request],
    time_scale: float,
    done: Callable[[str], None],
) -> ReplaySamples:
    length = await lengths.probe(server, Prompts(plan.seed))
    block_tokens = int((await server_state(http)).get("block_tokens", 1))
    samples = ReplaySamples(plan, server.model, time_scale, num_sessions(requests), block_tokens)
    for number in range(plan.repeats):
        name = f"replay-{plan.seed}-{number}"
        samples.rounds.append(await Replay(server, requests, length, block_tokens, name, done).run())
    return samples
