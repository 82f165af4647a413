"""How many words make a prompt of a wanted length, whatever the server's tokenizer and template: two probes tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.errors import BenchFailed

if TYPE_CHECKING:
    from bench.client import ChatServer
    from bench.words import Prompts

PROBES = (16, 116)
"""Words of the two prompts."""

PROBE_TOKENS = 8
"""Enough that one of them has visible text."""


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a prompt with `n` words: `fixed + per_word * n`."""

    fixed: float
    per_word: float

    def words_for(self, tokens: int) -> int:
        """Words that come closest to `tokens`; at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


def length_by(count: Callable[[int], int]) -> Length:
    """The line through the two probes; `count` tells the tokens of a prompt with so many words."""
    return _line(*(count(words) for words in PROBES))


async def probe(server: ChatServer, prompts: Prompts) -> Length:
    """Ask `server`; it is warmer afterwards, too.

    Raises:
        BenchFailed: it does not tell the tokens of a prompt.
    """
    replies = [await server.answer(prompts.draw(words), PROBE_TOKENS) for words in PROBES]
    first, second = (reply.prompt_tokens for reply in replies)
    if not 0 < first < second:
        raise BenchFailed("the server tells no usage.prompt_tokens for streams, so prompts cannot be sized")
    return _line(first, second)


def _line(first: int, second: int) -> Length:
    per_word = (second - first) / (PROBES[1] - PROBES[0])
    return Length(first - per_word * PROBES[0], per_word)
