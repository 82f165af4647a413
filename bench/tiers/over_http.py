"""Restore and recompute time of a running Dormouse, against prefix length, over HTTP.

A session's first turn is computed; then it is put to sleep in a tier and its next turn must wait for it. The server
tells how long the wake took and how much came from where; the time to the first token is the client's own. A server
that would rather compute it again says so, and that round has no restore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from bench import lengths
from bench.client import ChatServer, connect, first_model, server_state
from bench.errors import BenchFailed
from bench.tiers.restore import TIERS, Point, RestorePlan, RestoreSamples, raw_rates
from bench.words import Prompts, next_turn

if TYPE_CHECKING:
    import httpx

    from bench.client import Reply
    from bench.lengths import Length
    from bench.words import Messages

ANSWER_TOKENS = 8


class HttpBench:
    """Runs the rounds against one server."""

    def __init__(self, server: ChatServer, http: httpx.AsyncClient, samples: RestoreSamples, length: Length) -> None:
        self._server = server
        self._http = http
        self._samples = samples
        self._length = length
        self._prompts = Prompts(samples.plan.seed)
        self._num_sessions = 0

    async def run(self, block_tokens: int, block_bytes: int, done: Callable[[str], None]) -> None:
        """All lengths, all rounds.

        Raises:
            BenchFailed: an answer did, or the server has no such tier.
        """
        for tokens in self._samples.plan.lengths:
            point = Point(tokens)
            self._samples.points.append(point)
            for number in range(self._samples.plan.rounds):
                blocks = await self._round(point, block_tokens)
                point.bytes = max(point.bytes, blocks * block_bytes)
                done(f"{tokens:,} tokens, round {number + 1}")

    async def _round(self, point: Point, block_tokens: int) -> int:
        """Blocks that were restored."""
        self._num_sessions += 1
        session = f"bench-restore-{self._samples.plan.seed}-{self._num_sessions}"
        messages = self._prompts.draw(self._length.words_for(point.tokens))
        reply = await self._server.answer(messages, ANSWER_TOKENS, session)
        point.recompute_seconds.append(reply.ttft_seconds)
        blocks = 0
        for tier in TIERS:
            if await self._sleep(session, tier):
                messages, reply = await self._next(messages, reply, session)
                blocks = max(blocks, _note(point, tier, reply, block_tokens))
        await self._http.delete(self._url(session))
        return blocks

    async def _next(self, messages: Messages, reply: Reply, session: str) -> tuple[Messages, Reply]:
        messages = next_turn(messages, reply.text)
        return messages, await self._server.answer(messages, ANSWER_TOKENS, session)

    async def _sleep(self, session: str, tier: str) -> bool:
        """Whether all that is stored of it sleeps there now."""
        response = await self._http.post(f"{self._url(session)}/sleep", params={"tier": tier})
        if not response.is_success:
            raise BenchFailed(f"the server cannot put a session to sleep: {response.status_code} {response.text[:200]}")
        told = response.json()
        if told["status"] == "asleep":
            return True
        note = f"{tier}: a session could not sleep there ({told['reason']})"
        if note not in self._samples.notes:
            self._samples.notes.append(note)
        return False

    def _url(self, session: str) -> str:
        return f"{self._http.base_url}sessions/{quote(session, safe='')}"


def _note(point: Point, tier: str, reply: Reply, block_tokens: int) -> int:
    reused = int(reply.session["reused_tokens"][tier])
    if reply.session["woke_from"] != tier:
        reason = str(reply.session["miss_reason"] or f"woke from {reply.session['woke_from']}")
        point.declined[reason] = point.declined.get(reason, 0) + 1
        return 0
    point.restore_seconds[tier].append(reply.session["wake_ms"] / 1e3)
    point.ttft_seconds[tier].append(reply.ttft_seconds)
    return reused // block_tokens


def run(
    url: str,
    model: str | None,
    api_key: str | None,
    plan: RestorePlan,
    done: Callable[[str], None],
    place: Path | None = None,
) -> RestoreSamples:
    """The rounds, then the devices by themselves; `place` is on the server's disk, where that is this machine's.

    Raises:
        BenchFailed: it is no Dormouse, or an answer failed.
    """

    async def measure() -> RestoreSamples:
        async with connect(url, api_key) as http:
            state = await server_state(http)
            if not state:
                raise BenchFailed(f"{url} tells nothing of tiers at /admin/api/state: this measures Dormouse only")
            server = ChatServer(http, model or await first_model(http))
            samples = RestoreSamples(plan, f"{server.model} over HTTP")
            length = await lengths.probe(server, Prompts(plan.seed + 1))
            bench = HttpBench(server, http, samples, length)
            await bench.run(int(state["block_tokens"]), int(state["block_bytes"]), done)
            return samples

    samples = asyncio.run(measure())
    samples.raw = raw_rates(place)
    return samples
