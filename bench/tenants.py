"""What one key's flood costs another: the p95 of first tokens alone, and beside as many turns as the other can send.

    alone     `turns` turns of one key, one after the other, each a new prompt
    beside    the same again, of new prompts, while `clients` of another key ask without a pause

The server has two keys and is started for it. Words stand for tokens nearly one to one.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from app import keys
from bench.client import ChatServer, connect, first_model
from bench.errors import BenchFailed
from bench.server import serving
from bench.stats import p95, summary
from bench.words import Prompts

MOST_RATIO = 3.0
"""p95 beside a flood over p95 alone; the project's own bar."""

WARM_SECONDS = 3.0
"""In which the flood fills its part of the queue before anything is timed."""

RETRY_SECONDS = 0.05
PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class TenantsPlan:
    """How much is measured; the fixed workload is the default."""

    turns: int = 40
    words: int = 250
    tokens: int = 16
    clients: int = 24
    flood_words: int = 1_000
    flood_tokens: int = 32
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return 2 * self.turns


@dataclass(slots=True)
class TenantsSamples:
    """Seconds to the first text of every turn; `flooded` counts answers that the flood got meanwhile."""

    model: str
    plan: TenantsPlan
    flags: list[str]
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    flooded: int = 0

    @property
    def ratio(self) -> float:
        return p95(self.beside) / p95(self.alone)


def run(plan: TenantsPlan, flags: Sequence[str], done: Callable[[str], None]) -> TenantsSamples:
    """Start a server with two keys and measure."""
    one, other = keys.new_key(), keys.new_key()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.toml"
        file.write_text(f"{keys.lines('one', one)}\n{keys.lines('other', other)}\n")
        given = ["--api-keys-file", str(file), "--nvme-bytes", "0", *flags]
        with serving(given) as server:
            return asyncio.run(_measure(server.url, one, other, plan, list(flags), done))


async def _measure(
    url: str, one: str, other: str, plan: TenantsPlan, flags: list[str], done: Callable[[str], None]
) -> TenantsSamples:
    async with connect(url, one) as http, connect(url, other) as others:
        model = await first_model(http)
        samples = TenantsSamples(model, plan, flags)
        asked, prompts = ChatServer(http, model), Prompts(plan.seed)
        await asked.answer(prompts.draw(plan.words), plan.tokens)  # what a first request warms up
        samples.alone = await _turns(asked, prompts, plan, done, "alone")
        flood = [
            asyncio.create_task(_flood(ChatServer(others, model), Prompts(plan.seed + 1 + number), samples))
            for number in range(plan.clients)
        ]
        await asyncio.sleep(WARM_SECONDS)
        samples.beside = await _turns(asked, prompts, plan, done, "beside a flood")
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    return samples


async def _turns(
    server: ChatServer, prompts: Prompts, plan: TenantsPlan, done: Callable[[str], None], title: str
) -> list[float]:
    seconds = []
    for _ in range(plan.turns):
        reply = await server.answer(prompts.draw(plan.words), plan.tokens)
        seconds.append(reply.ttft_seconds)
        done(title)
        await asyncio.sleep(PAUSE_SECONDS)
    return seconds


async def _flood(server: ChatServer, prompts: Prompts, samples: TenantsSamples) -> None:
    plan = samples.plan
    while True:
        with suppress(BenchFailed):  # the queue is full of its own turns: it asks again
            await server.answer(prompts.draw(plan.flood_words), plan.flood_tokens)
            samples.flooded += 1
        await asyncio.sleep(RETRY_SECONDS)


def table(samples: TenantsSamples) -> Group:
    """For people."""
    plan, rows = samples.plan, Table()
    for name in ("one key's turns", "TTFT ms", "p95 ms", "most ms", "n"):
        rows.add_column(name, justify="left" if name == "one key's turns" else "right")
    for name, seconds in (("alone", samples.alone), ("beside another's flood", samples.beside)):
        told = summary(seconds).scaled(1e3)
        rows.add_row(name, f"{told.median:,.0f}", f"{p95(seconds) * 1e3:,.0f}", f"{told.high:,.0f}", f"{told.samples}")
    title = (
        f"{samples.model}: prompts of {plan.words} words, one at a time; the flood: {plan.clients} clients, prompts of "
        f"{plan.flood_words:,} words and answers of {plan.flood_tokens} tokens, {samples.flooded} answered"
    )
    verdict = "within" if samples.ratio <= MOST_RATIO else "beyond"
    return Group(Text(title), rows, Text(f"p95 x{samples.ratio:.2f}, {verdict} {MOST_RATIO:.0f}x"))


def part(samples: TenantsSamples) -> dict[str, Any]:
    """For programs."""
    return {
        **asdict(samples),
        "summary": {
            "alone_p95_seconds": p95(samples.alone),
            "beside_p95_seconds": p95(samples.beside),
            "p95_ratio": samples.ratio,
            "most_ratio": MOST_RATIO,
        },
    }
