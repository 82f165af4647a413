"""A hundred conversations at once, and what each turn reused and waited for.

    python examples/hundred_sessions.py --sessions 100 --turns 3

All of them together are more than fits into HBM of a small machine: between their turns they sleep, and each turn says
from where it woke.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai

TOPICS = ("mice", "owls", "rivers", "winter", "bread", "ships", "clocks", "moss", "snow", "lamps")


@dataclass
class Seen:
    """What the turns of one round said."""

    first_token_seconds: list[float] = field(default_factory=list)
    reused: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    recomputed: int = 0
    misses: Counter[str] = field(default_factory=Counter)

    def add(self, seconds: float, session: dict[str, Any]) -> None:
        self.first_token_seconds.append(seconds)
        self.reused.update(session["reused_tokens"])
        self.computed += session["computed_tokens"]
        self.recomputed += session["recomputed_tokens"]
        if session["miss_reason"]:
            self.misses[session["miss_reason"]] += 1

    def line(self, turn: int) -> str:
        reused = ", ".join(f"{tokens:,} from {tier}" for tier, tokens in self.reused.items() if tokens) or "nothing"
        slowest = sorted(self.first_token_seconds)[int(0.95 * (len(self.first_token_seconds) - 1))]
        return (
            f"turn {turn}: {len(self.first_token_seconds)} answers, first token after "
            f"{statistics.median(self.first_token_seconds):.2f} s, p95 {slowest:.2f} s; "
            f"reused {reused}; computed {self.computed:,}, again {self.recomputed:,}; misses {dict(self.misses)}"
        )


class Conversation:
    """One session's messages."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, name: str, number: int) -> None:
        self._client = client
        self._model = model
        self._id = f"{name}/{number}"
        topic = TOPICS[number % len(TOPICS)]
        self._messages: list[Any] = [{"role": "user", "content": f"Story {number}, about {topic}. How does it begin?"}]

    async def turn(self, tokens: int) -> tuple[float, dict[str, Any]]:
        """Stream the next answer; seconds to its first token, and its `session` object."""
        started, first, text, session = time.perf_counter(), None, "", {}
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            max_tokens=tokens,
            stream=True,
            extra_body={"session_id": self._id},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content and first is None:
                    first = time.perf_counter() - started
                text += choice.delta.content or ""
                if choice.finish_reason is not None and chunk.model_extra:
                    session = chunk.model_extra["session"]
        self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        return (time.perf_counter() - started if first is None else first), session


async def run(url: str, model: str | None, key: str, sessions: int, turns: int, tokens: int) -> list[Seen]:
    # Each conversation may wait for all the others before its turn comes.
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=600) as client:
        chosen = model or (await client.models.list()).data[0].id
        name = f"hundred-{uuid.uuid4().hex[:6]}"
        conversations = [Conversation(client, chosen, name, number) for number in range(sessions)]
        rounds = []
        for turn in range(1, turns + 1):
            seen = Seen()
            for seconds, session in await asyncio.gather(*(each.turn(tokens) for each in conversations)):
                seen.add(seconds, session)
            print(seen.line(turn), flush=True)
            rounds.append(seen)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=None, help="by default the first one served")
    parser.add_argument("--key", default="unused", help="API key, where the server asks for one")
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    options = parser.parse_args()
    asyncio.run(run(options.url, options.model, options.key, options.sessions, options.turns, options.tokens))


if __name__ == "__main__":
    main()
