"""Histories that share nothing with each other, in tokens, and what of one a turn could reuse."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.words import WORDS
from kvstore.types import Tier

if TYPE_CHECKING:
    from bench.tiers.rig import Model, Turn

QUESTION_TOKENS = 16


class Texts:
    """Draws texts of an exact number of tokens: random words, each its first token."""

    def __init__(self, model: Model, seed: int) -> None:
        encode = model.loaded.tokenizer.backend_tokenizer.encode
        self._ids = [encode(f" {word}", add_special_tokens=False).ids[0] for word in WORDS]
        self._random = random.Random(seed)

    def draw(self, num_tokens: int) -> array[int]:
        return array("I", self._random.choices(self._ids, k=num_tokens))


@dataclass(frozen=True, slots=True)
class Shape:
    """A session of `turns` turns; the first prompt has `tokens` tokens, each later one a question more."""

    tokens: int
    turns: int
    answer_tokens: int

    def blocks(self, block_tokens: int) -> int:
        """That a whole session takes, its last and partial one included."""
        longest = self.tokens + self.turns * self.answer_tokens + (self.turns - 1) * QUESTION_TOKENS
        return -(-longest // block_tokens)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A turn that went on from a history: what it reused, and where its time to the first token went."""

    history_tokens: int
    storable_blocks: int
    """floor((history - 1) / block): the last token of an answer is sampled and never computed."""
    reused_blocks: int
    dram_tokens: int
    """Of those reused, what had to come from DRAM."""
    nvme_tokens: int
    ttft_seconds: float
    queue_seconds: float
    wake_seconds: float
    prefill_seconds: float

    @property
    def is_whole(self) -> bool:
        """Was only the tail computed again?"""
        return self.reused_blocks == self.storable_blocks


def continuation(history_tokens: int, turn: Turn, block_tokens: int) -> Continuation:
    """What `turn` made of its history."""
    grant = turn.grant
    return Continuation(
        history_tokens=history_tokens,
        storable_blocks=(history_tokens - 1) // block_tokens,
        reused_blocks=grant.cached_tokens // block_tokens,
        dram_tokens=grant.reused[Tier.DRAM],
        nvme_tokens=grant.reused[Tier.NVME],
        ttft_seconds=turn.ttft_seconds,
        queue_seconds=grant.queue_seconds,
        wake_seconds=grant.wake_seconds,
        prefill_seconds=turn.prefill_seconds,
    )
