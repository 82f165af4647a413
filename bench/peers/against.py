"""Takes the samples of us and of the peers: one server after the other, round after round.

chat, streams   all servers run, and each has its turn in every round; who is first changes with the round
restart         each round starts a server, has it compute a long prompt, stops it, starts it again and asks on
sessions        each round starts a server with a given budget of memory and lets many conversations go on in it

A server that fails is told and left out of that round; the others go on.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bench import lengths
from bench.chat import NEXT_TURN_TOKENS, ChatBench, ChatPlan
from bench.client import ChatServer, connect, first_model
from bench.errors import BenchFailed
from bench.peers.lines import CONTEXTS, STREAMS
from bench.peers.recipes import GIB, Budget
from bench.sessions import SessionsBench, SessionsPlan, SessionsSamples
from bench.words import Prompts, next_turn

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from bench.peers.recipes import Recipe

Result = TypeVar("Result")

LONG_TOKENS = 5500
ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AgainstPlan:
    """What to measure; sessions have about 370 tokens a turn, and together four times the budget."""

    groups: tuple[str, ...] = ("chat", "streams", "restart", "sessions")
    repeats: int = 5
    session_repeats: int = 3
    sessions: int = 256
    turns: int = 4
    turn_tokens: int = 300
    """New in each prompt."""
    answer_tokens: int = 64
    in_flight: int = 16
    memory_bytes: int = 2 * GIB
    """Of K/V, for the sessions: our HBM and DRAM together, and the peers' caps."""
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        """For one server."""
        return sum(self.session_repeats if group == "sessions" else self.repeats for group in self.groups)


@dataclass(slots=True)
class AgainstSamples:
    """By line and server, an entry per round that did not fail."""

    plan: AgainstPlan
    servers: list[str]
    taken: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    ready_seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, line: str, server: str, value: float) -> None:
        """One sample."""
        self.taken.setdefault(line, {}).setdefault(server, []).append(value)


class Against:
    """Runs one plan; `kept` is called with what there is after each round, so that nothing is lost."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        plan: AgainstPlan,
        place: Path | None,
        done: Callable[[str], None],
        kept: Callable[[AgainstSamples], None],
    ) -> None:
        self._recipes = recipes
        self._plan = plan
        self._place = place
        self._done = done
        self._kept = kept
        self.samples = AgainstSamples(plan, [recipe.name for recipe in recipes])

    def run(self) -> AgainstSamples:
        """All groups, in the plan's order."""
        for group in self._plan.groups:
            match group:
                case "chat":
                    self._side_by_side(group, self._chat)
                case "streams":
                    self._side_by_side(group, self._streams)
                case "restart":
                    self._one_by_one(group, self._plan.repeats, self._restart)
                case "sessions":
                    self._one_by_one(group, self._plan.session_repeats, self._sessions)
                case _:
                    raise BenchFailed(f"no lines {group!r}: there are chat, streams, restart and sessions")
        return self.samples

    # --- how rounds are taken -----------------------------------------------------------------

    def _side_by_side(self, group: str, take: Callable[[Recipe, str, int], None]) -> None:
        with ExitStack() as stack:
            running: list[tuple[Recipe, str]] = []
            for recipe in self._recipes:
                with self._told(recipe, group):
                    folder = stack.enter_context(self._folder())
                    server = stack.enter_context(recipe.started(Path(folder)))
                    self.samples.ready_seconds.setdefault(recipe.name, []).append(server.ready_seconds)
                    running.append((recipe, server.url))
            for number in range(self._plan.repeats):
                for recipe, url in _turned(running, number):
                    with self._told(recipe, f"{group} {number + 1}"):
                        take(recipe, url, number)
                    self._done(f"{group} {number + 1}, {recipe.name}")
                self._kept(self.samples)

    def _one_by_one(self, group: str, repeats: int, take: Callable[[Recipe, int], None]) -> None:
        for number in range(repeats):
            for recipe in _turned(self._recipes, number):
                with self._told(recipe, f"{group} {number + 1}"):
                    take(recipe, number)
                self._done(f"{group} {number + 1}, {recipe.name}")
            self._kept(self.samples)

    def _told(self, recipe: Recipe, what: str) -> _Told:
        return _Told(self.samples.failures, f"{recipe.name}, {what}")

    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="bench-peers-", dir=self._place)

    def _seed(self, recipe: Recipe, number: int) -> int:
        """Texts of its own for every server and round: ours, exact and fast, must not find each other's."""
        return self._plan.seed + 1000 * self._recipes.index(recipe) + number

    # --- what is taken ------------------------------------------------------------------------

    def _chat(self, recipe: Recipe, url: str, number: int) -> None:
        plan = ChatPlan(CONTEXTS, (), 1, ANSWER_TOKENS, seed=self._seed(recipe, number))
        samples = _ask(url, lambda server: ChatBench(server, plan, lambda _: None).run())
        for each in samples.contexts:
            self.samples.add(f"decode {each.context}", recipe.name, each.decode_seconds_per_token[0])
            self.samples.add(f"prefill {each.context}", recipe.name, each.prefill_tokens_per_second[0])
            self.samples.add(f"next turn {each.context}", recipe.name, each.next_ttft_seconds[0])
        self._doubt(recipe, samples.doubts())

    def _streams(self, recipe: Recipe, url: str, number: int) -> None:
        # Other texts than those of the line before, whose servers may have been the same.
        plan = ChatPlan((), STREAMS, 1, ANSWER_TOKENS, seed=self._seed(recipe, number) + 500)
        samples = _ask(url, lambda server: ChatBench(server, plan, lambda _: None).run())
        for each in samples.streams:
            self.samples.add(f"{each.streams} streams", recipe.name, each.output_tokens_per_second[0])
        self._doubt(recipe, samples.doubts())

    def _restart(self, recipe: Recipe, number: int) -> None:
        prompts = Prompts(self._seed(recipe, number) + 200)
        with self._folder() as folder:
            with recipe.started(Path(folder)) as server:
                length = _ask(server.url, lambda chat: lengths.probe(chat, prompts))
                messages = prompts.draw(length.words_for(LONG_TOKENS))
                cold = _ask(server.url, lambda chat: chat.answer(messages, ANSWER_TOKENS, "bench-restart"))
            with recipe.started(Path(folder)) as server:
                # The first request of a process pays for what is made lazily, in every server.
                _ask(server.url, lambda chat: lengths.probe(chat, prompts))
                following = next_turn(messages, cold.text)
                reply = _ask(server.url, lambda chat: chat.answer(following, NEXT_TURN_TOKENS, "bench-restart"))
        self.samples.add("next turn 5500 after a restart", recipe.name, reply.ttft_seconds)

    def _sessions(self, recipe: Recipe, number: int) -> None:
        plan = self._plan
        of = SessionsPlan(
            sessions=plan.sessions,
            turns=plan.turns,
            in_flight=plan.in_flight,
            prompt_tokens=plan.turn_tokens,
            later_words=plan.turn_tokens,
            tokens=plan.answer_tokens,
            seed=self._seed(recipe, number) + 700,
        )
        with self._folder() as folder, recipe.started(Path(folder), Budget(plan.memory_bytes)) as server:
            samples = _ask(server.url, lambda chat: _many(chat, of))
        later = [turn.ttft_seconds for turn in samples.later]
        if not later:
            raise BenchFailed("; ".join(samples.failures[:3]) or "no session had a second turn")
        self.samples.add("256 sessions, mean TTFT of turns 2-4", recipe.name, statistics.fmean(later))
        self.samples.add("256 sessions, seconds in all", recipe.name, samples.seconds)
        if samples.failures:
            self._doubt(recipe, [f"{len(samples.failures)} turns failed: {samples.failures[0]}"])

    def _doubt(self, recipe: Recipe, doubts: Sequence[str]) -> None:
        self.samples.failures += [f"doubtful: {recipe.name}, {doubt}" for doubt in doubts]


class _Told:
    """Keeps what a benchmark's failure says, and goes on."""

    def __init__(self, failures: list[str], what: str) -> None:
        self._failures = failures
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, BenchFailed):
            return False
        self._failures.append(f"{self._what}: {error}")
        return True


def _turned(items: Sequence[Result], number: int) -> Iterator[Result]:
    """All of them, another one first in every round."""
    for index in range(len(items)):
        yield items[(index + number) % len(items)]


def _ask(url: str, do: Callable[[ChatServer], Awaitable[Result]]) -> Result:
    async def connected() -> Result:
        async with connect(url) as http:
            return await do(ChatServer(http, await first_model(http)))

    return asyncio.run(connected())


async def _many(chat: ChatServer, plan: SessionsPlan) -> SessionsSamples:
    length = await lengths.probe(chat, Prompts(plan.seed + 1))
    samples = SessionsSamples("peers", chat.model, plan, block_tokens=1)
    await SessionsBench(chat, samples, length.words_for(plan.prompt_tokens), lambda _: None).run()
    return samples
