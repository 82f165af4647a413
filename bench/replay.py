"""A trace replayed against a server: each request at its own time, whatever became of those before it.

Open loop. A latency counts from the moment at which the trace has the request arrive, so that what waits is not
hidden: neither in the server's queue nor here, where a turn whose session has not been answered yet must wait for the
text that it goes on from.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.errors import BenchFailed
from bench.sessions import SessionTurn, session_turn
from bench.words import FOLLOW_UP, OPENING, QUESTION, WORDS

if TYPE_CHECKING:
    from bench.client import ChatServer, Reply
    from bench.lengths import Length
    from bench.trace import Request
    from bench.words import Messages

MESSAGE_TOKENS = 8
"""That a template adds to a message, about."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What is replayed, as it was asked for."""

    trace: str
    requests: int = 120
    requests_per_second: float = 1.0
    length_scale: float = 0.05
    max_context: int = 6000
    max_output: int = 64
    repeats: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """One request that was answered; seconds since it should have arrived."""

    at: float
    """When it should have arrived, since the start."""
    prompt_tokens: int
    output_tokens: int
    sent_seconds: float
    """Until it was sent: it waited for the answer before it, or this process was late."""
    late_seconds: float
    """By which this process was."""
    ttft_seconds: float
    seconds: float
    """Until its last token."""
    turn: SessionTurn
    """Its own times are from when it was sent."""


@dataclass(slots=True)
class Round:
    """One replay."""

    answered: list[Answered] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_sent: int = 0
    """Of sessions whose turn before had failed."""
    seconds: float = 0.0


@dataclass(slots=True)
class ReplaySamples:
    """All rounds."""

    plan: ReplayPlan
    model: str
    time_scale: float
    """What the trace's times were multiplied by."""
    sessions: int
    block_tokens: int
    rounds: list[Round] = field(default_factory=list)


class Talk:
    """The messages of one session, and the words they are made of."""

    def __init__(self, session_id: str, length: Length, words: random.Random, group: random.Random) -> None:
        self.session_id = session_id
        self.history_tokens = 0
        self.turns = 0
        self.is_broken = False
        self._length = length
        self._words = words
        self._group = group
        self._messages: Messages = []
        self._ends: list[int] = []  # tokens up to each message's end, about

    def prompt(self, request: Request) -> Messages:
        """What the request sends; the session's words go on, or begin anew after what is kept."""
        if request.keep is not None:
            self._cut(request.keep)
        if not self._messages:
            words = self._draw(self._group, request.common) + self._draw(self._words, request.new)
            opening = {"role": "system", "content": f"{OPENING} {' '.join(words)}"}
            self._messages = [opening, {"role": "user", "content": QUESTION}]
            size = request.common + request.new
            self._ends = [size, size]
        else:
            words = self._draw(self._words, max(1, request.new - MESSAGE_TOKENS))
            self._messages.append({"role": "user", "content": f"{' '.join(words)}. {FOLLOW_UP}"})
            self._ends.append(self._ends[-1] + request.new)
        return list(self._messages)

    def hear(self, reply: Reply) -> None:
        """Take the answer in."""
        self._messages.append({"role": "assistant", "content": reply.text})
        self.history_tokens = reply.prompt_tokens + reply.output_tokens
        self._ends.append(self.history_tokens)
        self.turns += 1

    def _cut(self, keep: int) -> None:
        """Keep whole messages only, an answer last: what a client cuts begins with a message."""
        whole = sum(end <= keep for end in self._ends)
        while whole and self._messages[whole - 1]["role"] != "assistant":
            whole -= 1
        del self._messages[whole:], self._ends[whole:]
        self.history_tokens = self._ends[-1] if self._ends else 0

    def _draw(self, source: random.Random, tokens: int) -> list[str]:
        return source.choices(WORDS, k=round(tokens / self._length.per_word)) if tokens else []


class Replay:
    """One round against one server."""

    def __init__(
        self,
        server: ChatServer,
        requests: Sequence[Request],
        length: Length,
        block_tokens: int,
        name: str,
        done: Callable[[str], None],
    ) -> None:
        self._server = server
        self._requests = requests
        self._block_tokens = block_tokens
        self._done = done
        self._round = Round()
        self._talks: dict[int, Talk] = {}
        for request in requests:
            words = (random.Random(f"{name}-{part}") for part in (request.session, f"group-{request.group}"))
            self._talks.setdefault(request.session, Talk(f"{name}-{request.session}", length, *words))
        self._started_at = 0.0

    async def run(self) -> Round:
        """Send everything at its time; ends with the last answer."""
        self._started_at = time.perf_counter()
        ends: dict[int, asyncio.Event] = {}
        async with asyncio.TaskGroup() as tasks:
            for request in self._requests:
                intended = self._started_at + request.at
                await asyncio.sleep(max(0.0, intended - time.perf_counter()))
                late = time.perf_counter() - intended
                before, mine = ends.get(request.session), asyncio.Event()
                ends[request.session] = mine
                tasks.create_task(self._one(request, intended, late, before, mine))
        self._round.seconds = time.perf_counter() - self._started_at
        return self._round

    async def _one(
        self, request: Request, intended: float, late: float, before: asyncio.Event | None, ended: asyncio.Event
    ) -> None:
        try:
            if before is not None:
                await before.wait()
            talk = self._talks[request.session]
            if talk.is_broken:
                self._round.not_sent += 1
            else:
                await self._send(request, talk, intended, late)
        finally:
            ended.set()
            self._done(f"{len(self._round.failures)} failed")

    async def _send(self, request: Request, talk: Talk, intended: float, late: float) -> None:
        messages, history = talk.prompt(request), talk.history_tokens
        try:
            reply = await self._server.answer(messages, request.out, talk.session_id)
        except BenchFailed as exc:
            self._round.failures.append(str(exc))
            talk.is_broken = True
            return
        talk.hear(reply)
        self._round.answered.append(
            Answered(
                at=request.at,
                prompt_tokens=reply.prompt_tokens,
                output_tokens=reply.output_tokens,
                sent_seconds=reply.started_at - intended,
                late_seconds=late,
                ttft_seconds=reply.text_at[0] - intended,
                seconds=reply.last_token_at - intended,
                turn=session_turn(talk.turns, history, reply, self._block_tokens),
            )
        )


def num_sessions(requests: Sequence[Request]) -> int:
    """That `requests` belong to."""
    return len({request.session for request in requests})


def most_in_flight(answered: Sequence[Answered]) -> int:
    """Requests that had arrived and not ended, at the worst moment."""
    moments = sorted([(each.at, 1) for each in answered] + [(each.at + each.seconds, -1) for each in answered])
    return max(itertools.accumulate(change for _, change in moments), default=0)
