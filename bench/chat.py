"""What a person at an OpenAI-compatible server waits for, HTTP to HTTP.

cold turn   a prompt that nobody sent before: time to its first token, then time between tokens
next turn   the same conversation with its answer and a short question: time to its first token
streams     distinct prompts sent together: output tokens a second, first request to last token, and what one of their
            readers waits for
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench import lengths
from bench.words import Prompts, next_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.client import ChatServer, Reply

OPENING_TOKENS = 16
"""A template's own beginning, which every prompt shares: a server that reuses single tokens finds it."""

NEXT_TURN_TOKENS = 8
"""Enough that one of them has visible text."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What to measure."""

    contexts: tuple[int, ...] = (140, 2000, 5500)
    """Tokens of prompts."""
    streams: tuple[int, ...] = (4, 8, 16)
    repeats: int = 3
    tokens: int = 64
    """Tokens of each answer."""
    stream_prompt_tokens: int = 200
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        """Measurements, the warm-up not counted."""
        return self.repeats * (len(self.contexts) + len(self.streams))


@dataclass(slots=True)
class ContextSamples:
    """One length of context; an entry per repeat."""

    context: int
    prompt_tokens: list[int] = field(default_factory=list)
    cold_cached_tokens: list[int | None] = field(default_factory=list)
    """Of the cold prompt: anything but 0 or None means that it was not cold."""
    cold_ttft_seconds: list[float] = field(default_factory=list)
    prefill_tokens_per_second: list[float] = field(default_factory=list)
    """Tokens of the prompt over time to first token: transport, template and sampling included."""
    output_tokens: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    """Times that the answer's text arrived: fewer than tokens where one had no text, or several came together."""
    decode_seconds_per_token: list[float] = field(default_factory=list)
    next_prompt_tokens: list[int] = field(default_factory=list)
    next_cached_tokens: list[int | None] = field(default_factory=list)
    next_ttft_seconds: list[float] = field(default_factory=list)

    def add(self, cold: Reply, following: Reply) -> None:
        """One cold turn and the one after it."""
        self.prompt_tokens.append(cold.prompt_tokens)
        self.cold_cached_tokens.append(cold.cached_tokens)
        self.cold_ttft_seconds.append(cold.ttft_seconds)
        self.prefill_tokens_per_second.append(cold.prompt_tokens / cold.ttft_seconds)
        self.output_tokens.append(cold.output_tokens)
        self.pieces.append(len(cold.text_at))
        self.decode_seconds_per_token.append(cold.seconds_per_token)
        self.next_prompt_tokens.append(following.prompt_tokens)
        self.next_cached_tokens.append(following.cached_tokens)
        self.next_ttft_seconds.append(following.ttft_seconds)


@dataclass(slots=True)
class StreamSamples:
    """One number of parallel streams; an entry per repeat."""

    streams: int
    seconds: list[float] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    output_tokens_per_second: list[float] = field(default_factory=list)
    ttft_seconds: list[float] = field(default_factory=list)
    """Median over the streams."""
    decode_seconds_per_token: list[float] = field(default_factory=list)
    """Median over the streams: what one reader sees between tokens."""

    def add(self, replies: list[Reply]) -> None:
        """Answers that were asked for together."""
        seconds = max(reply.last_token_at for reply in replies) - min(reply.started_at for reply in replies)
        tokens = sum(reply.output_tokens for reply in replies)
        self.seconds.append(seconds)
        self.output_tokens.append(tokens)
        self.cached_tokens.append(sum(reply.cached_tokens or 0 for reply in replies))
        self.output_tokens_per_second.append(tokens / seconds)
        self.ttft_seconds.append(statistics.median(reply.ttft_seconds for reply in replies))
        self.decode_seconds_per_token.append(statistics.median(reply.seconds_per_token for reply in replies))


@dataclass(slots=True)
class ChatSamples:
    """Everything that one run of a plan measured."""

    model: str
    plan: ChatPlan
    contexts: list[ContextSamples]
    streams: list[StreamSamples]

    def doubts(self) -> list[str]:
        """What makes a figure other than it seems."""
        return [
            *(f"at {each.context} tokens of context {doubt}" for each in self.contexts for doubt in self._of(each)),
            *(f"with {each.streams} streams {doubt}" for each in self.streams for doubt in self._of_streams(each)),
        ]

    def _of(self, samples: ContextSamples) -> Iterator[str]:
        if any(cached is not None and cached > OPENING_TOKENS for cached in samples.cold_cached_tokens):
            yield f"the cold prompts were not cold: {samples.cold_cached_tokens} tokens were reused"
        if set(samples.output_tokens) != {self.plan.tokens}:
            yield f"answers had {samples.output_tokens} tokens, not {self.plan.tokens}: is ignore_eos unknown there?"
        if all(not tokens for tokens in samples.next_cached_tokens) and None not in samples.next_cached_tokens:
            yield "the next turn reused nothing"

    def _of_streams(self, samples: StreamSamples) -> Iterator[str]:
        if any(cached > OPENING_TOKENS * samples.streams for cached in samples.cached_tokens):
            yield f"the prompts were not cold: {samples.cached_tokens} tokens were reused"
        if set(samples.output_tokens) != {self.plan.tokens * samples.streams}:
            yield f"answers had {samples.output_tokens} tokens together, not {self.plan.tokens * samples.streams}"


class ChatBench:
    """Runs one plan against one server."""

    def __init__(self, server: ChatServer, plan: ChatPlan, done: Callable[[str], None]) -> None:
        self._server = server
        self._plan = plan
        self._done = done
        """Told what was just measured."""
        self._prompts = Prompts(plan.seed)
        self._length = lengths.Length(0, 1)

    async def run(self) -> ChatSamples:
        """Measure everything `repeats` times.

        All of it once, then all of it again: what disturbs the machine for a while then disturbs single samples of
        every figure instead of all samples of one.

        Raises:
            BenchFailed: an answer did.
        """
        self._length = await lengths.probe(self._server, self._prompts)
        contexts = [ContextSamples(context) for context in self._plan.contexts]
        streams = [StreamSamples(number) for number in self._plan.streams]
        for _ in range(self._plan.repeats):
            for context in contexts:
                context.add(*await self._conversation(context.context))
                self._done(f"{context.context} tokens of context")
            for each in streams:
                each.add(await self._together(each.streams))
                self._done(f"{each.streams} streams")
        return ChatSamples(self._server.model, self._plan, contexts, streams)

    async def _conversation(self, context: int) -> tuple[Reply, Reply]:
        messages = self._prompts.draw(self._length.words_for(context))
        cold = await self._server.answer(messages, self._plan.tokens)
        return cold, await self._server.answer(next_turn(messages, cold.text), NEXT_TURN_TOKENS)

    async def _together(self, number: int) -> list[Reply]:
        words = self._length.words_for(self._plan.stream_prompt_tokens)
        prompts = [self._prompts.draw(words) for _ in range(number)]
        return await asyncio.gather(*(self._server.answer(prompt, self._plan.tokens) for prompt in prompts))
