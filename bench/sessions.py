"""Many conversations over HTTP, their turns in random order and several at once: does each find its history?

Which session goes on next is drawn from those with turns left and none in flight. A turn sends the whole conversation,
as a client does that keeps it, under its session's id; what it reused is what the server says of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bench.errors import BenchFailed
from bench.words import Prompts, next_turn

if TYPE_CHECKING:
    from bench.client import ChatServer, Reply
    from bench.words import Messages

GOAL_SHARE = 0.995
"""Of storable blocks reused on later turns; the project's own bar."""

TIERS = ("hbm", "dram", "nvme")


@dataclass(frozen=True, slots=True)
class SessionsPlan:
    """What to measure; with the embedded model's template a history has about 600 tokens after three turns."""

    sessions: int = 1024
    turns: int = 3
    in_flight: int = 64
    prompt_tokens: int = 500
    """Of each first prompt."""
    tokens: int = 16
    """Of each answer."""
    hbm_for: int = 60
    """Whole sessions that HBM holds."""
    dram_for: int = 200
    max_seconds: float | None = None
    """After these no turn is begun."""
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return self.sessions * self.turns


QUICK = SessionsPlan(sessions=24, in_flight=8, hbm_for=4, dram_for=8)


def plan(given: Mapping[str, int | None], *, seed: int, max_seconds: float | None, is_quick: bool) -> SessionsPlan:
    """The full plan or the quick one, with the sizes that were given."""
    sizes = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if is_quick else SessionsPlan(), **sizes, seed=seed, max_seconds=max_seconds)


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One turn that did not fail."""

    number: int
    """From 1."""
    history_tokens: int
    """Prompt and answer of the turn before; 0 in the first."""
    storable_blocks: int
    """floor((history - 1) / block): the last token of an answer is sampled and never computed."""
    reused_tokens: dict[str, int]
    """By tier."""
    reused_blocks: int
    """Of those storable."""
    woke_from: str | None
    miss_reason: str | None
    ttft_seconds: float
    """At the client, from the request to the first visible text."""
    queue_seconds: float
    wake_seconds: float
    prefill_seconds: float
    """From the grant to the first token, at the server."""

    @property
    def other_seconds(self) -> float:
        """Template, tokenizer, transport, and tokens that had no text of their own."""
        return self.ttft_seconds - self.queue_seconds - self.wake_seconds - self.prefill_seconds


@dataclass(slots=True)
class SessionsSamples:
    """Every turn of one run, in the order they ended."""

    title: str
    model: str
    plan: SessionsPlan
    block_tokens: int
    flags: list[str] = field(default_factory=list)
    """That the server was started with."""
    turns: list[SessionTurn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why turns failed; what was left of their sessions was not asked for."""
    not_begun: int = 0
    """Turns that were left when the time was up."""
    seconds: float = 0.0
    load_averages: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Before and after."""

    @property
    def later(self) -> list[SessionTurn]:
        return [turn for turn in self.turns if turn.number > 1]

    @property
    def storable_blocks(self) -> int:
        return sum(turn.storable_blocks for turn in self.turns)

    @property
    def reused_blocks(self) -> int:
        return sum(turn.reused_blocks for turn in self.turns)

    @property
    def reused_share(self) -> float | None:
        """None where nothing was storable."""
        return self.reused_blocks / self.storable_blocks if self.storable_blocks else None

    @property
    def reaches_goal(self) -> bool:
        """All turns ran, none failed, and later ones reused as much as is asked for."""
        share = self.reused_share
        return not (self.failures or self.not_begun) and share is not None and share >= GOAL_SHARE


def session_turn(number: int, history_tokens: int, reply: Reply, block_tokens: int) -> SessionTurn:
    """What `reply` says of its turn.

    Raises:
        BenchFailed: it says nothing of its session, so it is no Dormouse's.
    """
    try:
        reused = {tier: int(reply.session["reused_tokens"][tier]) for tier in TIERS}
        storable = max(0, history_tokens - 1) // block_tokens
        return SessionTurn(
            number=number,
            history_tokens=history_tokens,
            storable_blocks=storable,
            reused_tokens=reused,
            reused_blocks=min(storable, sum(reused.values()) // block_tokens),
            woke_from=reply.session["woke_from"],
            miss_reason=reply.session["miss_reason"],
            ttft_seconds=reply.ttft_seconds,
            queue_seconds=reply.session["queue_ms"] / 1e3,
            wake_seconds=reply.session["wake_ms"] / 1e3,
            prefill_seconds=reply.timings["prompt_ms"] / 1e3,
        )
    except (LookupError, TypeError) as exc:
        raise BenchFailed("the server tells nothing of a turn's session: this measures Dormouse only") from exc


@dataclass(slots=True, eq=False)
class Conversation:
    """One that may have turns left."""

    session_id: str
    messages: Messages
    turns: int = 0
    """That have ended."""
    history_tokens: int = 0


class SessionsBench:
    """Keeps turns in flight on one server until no conversation has any left, or the time is up."""

    def __init__(
        self, server: ChatServer, samples: SessionsSamples, num_words: int, done: Callable[[str], None]
    ) -> None:
        self._server = server
        self._samples = samples
        self._done = done
        plan = samples.plan
        self._random = random.Random(plan.seed)
        self._prompts = Prompts(plan.seed)
        self._ready = [
            Conversation(f"bench-{plan.seed}-{number}", self._prompts.draw(num_words))
            for number in range(plan.sessions)
        ]
        self._deadline: float | None = None

    async def run(self) -> None:
        """All turns of all conversations; failures are counted."""
        samples, plan = self._samples, self._samples.plan
        started = time.perf_counter()
        self._deadline = None if plan.max_seconds is None else started + plan.max_seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(plan.in_flight):
                tasks.create_task(self._keep_one_in_flight())
        samples.seconds = time.perf_counter() - started
        samples.not_begun = sum(plan.turns - each.turns for each in self._ready)

    def _is_time_up(self) -> bool:
        return self._deadline is not None and time.perf_counter() >= self._deadline

    async def _keep_one_in_flight(self) -> None:
        # Where all that have turns left are in flight, whoever runs them goes on with them.
        while self._ready and not self._is_time_up():
            conversation = self._ready.pop(self._random.randrange(len(self._ready)))
            try:
                await self._turn(conversation)
            except BenchFailed as exc:
                self._samples.failures.append(str(exc))
            else:
                if conversation.turns < self._samples.plan.turns:
                    self._ready.append(conversation)
            self._done(self._so_far())

    async def _turn(self, conversation: Conversation) -> None:
        samples = self._samples
        reply = await self._server.answer(conversation.messages, samples.plan.tokens, conversation.session_id)
        conversation.turns += 1
        samples.turns.append(session_turn(conversation.turns, conversation.history_tokens, reply, samples.block_tokens))
        conversation.history_tokens = reply.prompt_tokens + reply.output_tokens
        conversation.messages = next_turn(conversation.messages, reply.text)

    def _so_far(self) -> str:
        share = self._samples.reused_share
        reused = "" if share is None else f", {share:.2%} reused"
        return f"{len(self._samples.failures)} failed{reused}"
