"""Many conversations over HTTP, their turns in random order and several at once: does each find its history?

Which session goes on next is drawn from those with turns left whose user has thought long enough. A turn sends the
whole conversation, as a client does that keeps it, under its session's id; what it reused is what the server says of
it. Ours splits the time to the first token into queue, wake and prefill; others tell some of it, or nothing.
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
    later_words: int = 0
    """Before the question of each later turn; most words are one token."""
    tokens: int = 16
    """Of each answer."""
    hbm_for: int = 60
    """Whole sessions that HBM holds."""
    dram_for: int = 200
    think_seconds: float = 0.0
    """Mean from an answer's end to the next question, drawn from an exponential distribution."""
    max_seconds: float | None = None
    """After these no turn is begun."""
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return self.sessions * self.turns


QUICK = SessionsPlan(sessions=24, in_flight=8, hbm_for=4, dram_for=8)


def plan(
    given: Mapping[str, int | None],
    *,
    seed: int,
    max_seconds: float | None,
    is_quick: bool,
    think_seconds: float = 0.0,
) -> SessionsPlan:
    """The full plan or the quick one, with the sizes that were given."""
    sizes = {name: value for name, value in given.items() if value is not None}
    times = {"seed": seed, "max_seconds": max_seconds, "think_seconds": think_seconds}
    return replace(QUICK if is_quick else SessionsPlan(), **sizes, **times)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One turn that did not fail."""

    number: int
    """From 1."""
    history_tokens: int
    """Prompt and answer of the turn before; 0 in the first."""
    storable_blocks: int
    """floor((history - 1) / block): the last token of an answer is sampled and never computed. 0 where the server does
    not tell what it reused; blocks of one token where it tells no block."""
    reused_tokens: dict[str, int]
    """By tier; of other servers, under `cached`."""
    reused_blocks: int
    """Of those storable."""
    woke_from: str | None
    miss_reason: str | None
    ttft_seconds: float
    """At the client, from the request to the first visible text."""
    queue_seconds: float | None
    wake_seconds: float | None
    prefill_seconds: float | None
    """From the grant to the first token, at the server. None of these where it does not tell."""

    @property
    def other_seconds(self) -> float:
        """Template, tokenizer, transport, tokens that had no text of their own, and what the server did not tell."""
        told = (self.queue_seconds, self.wake_seconds, self.prefill_seconds)
        return self.ttft_seconds - sum(seconds for seconds in told if seconds is not None)


@dataclass(slots=True)
class SessionsSamples:
    """Every turn of one run, in the order they ended."""

    title: str
    model: str
    plan: SessionsPlan
    block_tokens: int
    """1 where the server tells no block."""
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
    """What `reply` says of its turn."""
    storable = max(0, history_tokens - 1) // block_tokens
    session, timings = reply.session, reply.timings
    if session:
        reused = {tier: int(session["reused_tokens"][tier]) for tier in TIERS}
    elif reply.cached_tokens is not None:
        reused = {"cached": reply.cached_tokens}
    else:
        reused, storable = {}, 0
    return SessionTurn(
        number=number,
        history_tokens=history_tokens,
        storable_blocks=storable,
        reused_tokens=reused,
        reused_blocks=min(storable, sum(reused.values()) // block_tokens),
        woke_from=session.get("woke_from"),
        miss_reason=session.get("miss_reason"),
        ttft_seconds=reply.ttft_seconds,
        queue_seconds=_seconds(session.get("queue_ms")),
        wake_seconds=_seconds(session.get("wake_ms")),
        prefill_seconds=_seconds(timings.get("prompt_ms")),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


@dataclass(slots=True, eq=False)
class Conversation:
    """One that may have turns left."""

    session_id: str
    messages: Messages
    turns_left: int
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
        self._conversations = [
            Conversation(f"bench-{plan.seed}-{number}", self._prompts.draw(num_words), plan.turns)
            for number in range(plan.sessions)
        ]
        self._ready = list(self._conversations)
        self._num_thinking = 0
        self._news = asyncio.Event()
        """Somebody has thought enough, or the time is up."""
        self._is_time_up = False

    async def run(self) -> None:
        """All turns of all conversations; failures are counted."""
        samples, loop = self._samples, asyncio.get_running_loop()
        started = time.perf_counter()
        seconds = samples.plan.max_seconds
        bell = None if seconds is None else loop.call_later(seconds, self._end)
        if seconds is not None and seconds <= 0:
            self._end()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(samples.plan.in_flight):
                tasks.create_task(self._keep_one_in_flight())
        if bell is not None:
            bell.cancel()
        samples.seconds = time.perf_counter() - started
        samples.not_begun = sum(each.turns_left for each in self._conversations)

    def _end(self) -> None:
        self._is_time_up = True
        self._news.set()

    async def _keep_one_in_flight(self) -> None:
        # Where all that have turns left are in flight, whoever runs them goes on with them.
        while (conversation := await self._next()) is not None:
            try:
                await self._turn(conversation)
            except BenchFailed as exc:
                self._samples.failures.append(str(exc))
                conversation.turns_left = 0
            if conversation.turns_left:
                self._let_think(conversation)
            self._done(self._so_far())

    async def _next(self) -> Conversation | None:
        while not self._ready and self._num_thinking and not self._is_time_up:
            self._news.clear()
            await self._news.wait()
        if not self._ready or self._is_time_up:
            return None
        return self._ready.pop(self._random.randrange(len(self._ready)))

    def _let_think(self, conversation: Conversation) -> None:
        mean = self._samples.plan.think_seconds
        if not mean:
            self._ready.append(conversation)
            return
        self._num_thinking += 1
        asyncio.get_running_loop().call_later(self._random.expovariate(1 / mean), self._thought, conversation)

    def _thought(self, conversation: Conversation) -> None:
        self._num_thinking -= 1
        self._ready.append(conversation)
        self._news.set()

    async def _turn(self, conversation: Conversation) -> None:
        samples = self._samples
        reply = await self._server.answer(conversation.messages, samples.plan.tokens, conversation.session_id)
        number = samples.plan.turns - conversation.turns_left + 1
        conversation.turns_left -= 1
        samples.turns.append(session_turn(number, conversation.history_tokens, reply, samples.block_tokens))
        conversation.history_tokens = reply.prompt_tokens + reply.output_tokens
        words = self._prompts.text(samples.plan.later_words)
        conversation.messages = next_turn(conversation.messages, reply.text, words)

    def _so_far(self) -> str:
        share = self._samples.reused_share
        reused = "" if share is None else f", {share:.2%} reused"
        return f"{len(self._samples.failures)} failed{reused}"
