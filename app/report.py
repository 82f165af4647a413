"""The `session`, `usage` and `timings` objects of an answer: what was reused, what was computed, and why not less.

Positions of one turn, prompt and output together:

    [0, reused)                 K/V was there
    [reused, had)               K/V had existed in this branch, and was computed again: `recomputed_tokens`
    [max(reused, had), end)     new: `computed_tokens`, the last sampled token among them

`had` is what the prompt shares with the branch's exact tokens, short of the last prompt token, which is always
computed. Only full blocks are stored, so a turn whose whole history is warm recomputes less than one block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

MISS_REASONS = (
    "new_session",
    "new_branch",
    "prompt_diverged",
    "evicted",
    "not_written",
    "load_failed",
    "load_timeout",
    "recompute_cheaper",
    "model_changed",
    "expired",
    "corrupt",
    "store_format",
    "catalog_lost",
    "cache_disabled",
)
"""Every value of `miss_reason` but null."""

DIVERGED_CHARACTERS = 80
"""Of either text: enough to see a date or a counter in a system prompt, too little to log a conversation."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left its branch: the token, the message, and the two texts there."""

    token: int
    message_index: int
    stored: str
    received: str

    def as_object(self) -> dict[str, object]:
        """`session.diverged`."""
        cut = slice(DIVERGED_CHARACTERS)
        return {"message_index": self.message_index, "stored": self.stored[cut], "received": self.received[cut]}


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a turn before it runs: whose it is, and what its branch has of the prompt.

    The branch had K/V for `history_tokens` positions; `had_tokens` of them the prompt shares.
    `absence` says why there is no history, None where there is some.
    """

    session_id: str
    id_source: str
    parent_id: str | None
    branch: int
    turn: int
    prompt_tokens: int
    history_tokens: int
    had_tokens: int
    absence: str | None
    divergence: Divergence | None
    cache: bool


@dataclass(slots=True)
class Figures:
    """What a turn turned out to do; filled while it runs. Seconds since its arrival, where not said otherwise."""

    reused: dict[Tier, int] = field(default_factory=dict)
    queue_seconds: float = 0.0
    granted_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    output_tokens: int = 0
    stored_tokens: int = 0

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


def recomputed_tokens(standing: Standing, figures: Figures) -> int:
    """Positions that had K/V and were computed again."""
    return max(0, standing.had_tokens - figures.reused_tokens)


def computed_tokens(standing: Standing, figures: Figures) -> int:
    """Positions computed for the first time."""
    total = standing.prompt_tokens + figures.output_tokens
    return total - figures.reused_tokens - recomputed_tokens(standing, figures)


def miss_reason(standing: Standing, figures: Figures, block_tokens: int) -> str | None:
    """Why history was computed again; None exactly when there is history and every storable block of it was reused."""
    if not standing.cache:
        return "cache_disabled"
    if standing.absence is not None:
        return standing.absence
    if figures.reused_tokens >= standing.history_tokens // block_tokens * block_tokens:
        return None
    # A prompt that left its branch and also lost blocks tells of the loss here; `diverged_at` tells of the rest.
    if figures.reused_tokens < standing.had_tokens // block_tokens * block_tokens:
        return "evicted"
    return "prompt_diverged"


def session_as_granted(standing: Standing, figures: Figures, block_tokens: int) -> dict[str, object]:
    """What the grant knows, for a stream's first chunk."""
    divergence = standing.divergence
    return {
        "id": standing.session_id,
        "id_source": standing.id_source,
        "parent_id": standing.parent_id,
        "branch": standing.branch,
        "turn": standing.turn,
        "reused_tokens": by_tier(figures.reused),
        "woke_from": woke_from(figures.reused),
        "wake_ms": 0.0,
        "wake_trigger": None,
        "queue_ms": milliseconds(figures.queue_seconds),
        "miss_reason": miss_reason(standing, figures, block_tokens),
        "diverged_at": divergence.token if divergence else None,
        "diverged": divergence.as_object() if divergence else None,
    }


def session(standing: Standing, figures: Figures, block_tokens: int) -> dict[str, object]:
    """The whole `session` object, once the turn has ended."""
    return {
        **session_as_granted(standing, figures, block_tokens),
        "computed_tokens": computed_tokens(standing, figures),
        "recomputed_tokens": recomputed_tokens(standing, figures),
        "stored_tokens": figures.stored_tokens,
    }


def usage(standing: Standing, figures: Figures, block_tokens: int) -> dict[str, object]:
    """OpenAI's `usage`; the details repeat what clients that drop unknown keys would miss."""
    return {
        "prompt_tokens": standing.prompt_tokens,
        "completion_tokens": figures.output_tokens,
        "total_tokens": standing.prompt_tokens + figures.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": figures.reused_tokens,
            "cache_write_tokens": figures.stored_tokens,
            "reused_tokens": by_tier(figures.reused),
            "miss_reason": miss_reason(standing, figures, block_tokens),
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def timings(standing: Standing, figures: Figures) -> dict[str, object]:
    """llama-server's `timings`.

    The first token comes with the prompt's last step, so the rate of prediction counts the tokens after it.
    """
    first = figures.first_token_at if figures.first_token_at is not None else figures.last_token_at
    prompt_seconds = max(0.0, first - figures.granted_at)
    predicted_seconds = max(0.0, figures.last_token_at - first)
    prompt_tokens = standing.prompt_tokens - figures.reused_tokens
    return {
        "cache_n": figures.reused_tokens,
        "prompt_n": prompt_tokens,
        "prompt_ms": milliseconds(prompt_seconds),
        "prompt_per_second": _rate(prompt_tokens, prompt_seconds),
        "predicted_n": figures.output_tokens,
        "predicted_ms": milliseconds(predicted_seconds),
        "predicted_per_second": _rate(figures.output_tokens - 1, predicted_seconds),
    }


def by_tier(reused: Mapping[Tier, int]) -> dict[str, int]:
    """Tokens under the names of all tiers, zeros included."""
    return {tier.name.lower(): reused.get(tier, 0) for tier in Tier}


def woke_from(reused: Mapping[Tier, int]) -> str | None:
    """The deepest tier that anything came from."""
    deepest = max((tier for tier, tokens in reused.items() if tokens), default=None)
    return None if deepest is None else deepest.name.lower()


def milliseconds(seconds: float) -> float:
    """Seconds as a JSON number of milliseconds, to the microsecond."""
    return round(seconds * 1000, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 2) if seconds > 0 and tokens > 0 else 0.0
