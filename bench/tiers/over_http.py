"""Restore and recompute time of a running Dormouse, against prefix length, over HTTP.

A session's first turn is computed; then it is put to sleep in a tier and woken by a hint that waits for its end: that
is the restore, with a round trip of HTTP in it. Then it sleeps once more, and its next turn finds it there unannounced:
the time to that turn's first token is the client's own. A server that would rather compute it again says so, and that
round has no restore.
"""

from __future__ import annotations

import asyncio
import time
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
            if not await self._sleep(session, tier):
                continue
            blocks = max(blocks, await self._wake(session, tier, point) // block_tokens)
            await self._sleep(session, tier)
            messages, reply = await self._next(messages, reply, session)
            if reply.session["woke_from"] == tier:
                point.ttft_seconds[tier].append(reply.ttft_seconds)
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

    async def _wake(self, session: str, tier: str, point: Point) -> int:
        """Tokens that are in HBM again."""
        started = time.perf_counter()
        response = await self._http.post(f"{self._url(session)}/wake", json={"to": "hbm", "wait": True})
        seconds = time.perf_counter() - started
        told = response.json()
        if not response.is_success or told["status"] != "awake":
            reason = str(told.get("reason") or told.get("status") or response.status_code)
            point.declined[reason] = point.declined.get(reason, 0) + 1
            return 0
        point.restore_seconds[tier].append(seconds)
        return int(told["tokens"])

    def _url(self, session: str) -> str:
        return f"{self._http.base_url}sessions/{quote(session, safe='')}"


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
