"""The `session`, `usage` and `timings` objects of an answer: what was reused, what was computed, and why not less.

The accounting itself is the store's (kvstore/reuse.py): of the prompt, every token was reused, recomputed or computed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from app.user_agents import UNKNOWN
from kvstore.reuse import MissReason, Reuse, account
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from models.chat import Divergence


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a turn before it runs: whose it is, and what its branch has of the prompt.

    `history_tokens` is the length of the branch, 0 for a new one; the prompt shares its first `shared_tokens`.
    """

    session_id: str
    id_source: str
    parent_id: str | None
    branch: int
    turn: int
    prompt_tokens: int
    history_tokens: int
    shared_tokens: int
    is_known_session: bool
    block_tokens: int
    cache: bool
    divergence: Divergence | None
    gone: MissReason = MissReason.NEW_SESSION
    """Why an unknown session has no history."""
    written_tokens: int | None = None
    """Of a branch read back after a restart: its first tokens whose blocks were on NVMe then."""
    client: str = UNKNOWN
    """What the program calls itself that asked."""


@dataclass(slots=True)
class Figures:
    """What a turn turned out to do; filled while it runs. Seconds since its arrival, where not said otherwise."""

    reused: dict[Tier, int] = field(default_factory=dict)
    miss: MissReason | None = None
    """Why shared blocks could not be had, where the store says so."""
    wake_seconds: float = 0.0
    wake_trigger: str | None = None
    queue_seconds: float = 0.0
    granted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    output_tokens: int = 0
    stored_tokens: int = 0

    @property
    def ran(self) -> bool:
        """It was granted; before that nothing of it was reused or computed."""
        return self.granted_at is not None

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


@dataclass(frozen=True, slots=True)
class Counted:
    """Another turn of the same request; one that has no prompt of its own is a further choice."""

    standing: Standing
    figures: Figures
    has_own_prompt: bool


def reuse(standing: Standing, figures: Figures) -> Reuse:
    """What became of the prompt's tokens, and why not more of them were reused."""
    return account(
        prompt_tokens=standing.prompt_tokens,
        history_tokens=standing.history_tokens,
        shared_tokens=standing.shared_tokens,
        reused_tokens=figures.reused_tokens,
        block_tokens=standing.block_tokens,
        is_known_session=standing.is_known_session,
        cache=standing.cache,
        missed=_missed(standing, figures),
        gone=standing.gone,
    )


def _missed(standing: Standing, figures: Figures) -> MissReason:
    """Why the first shared block that was not reused was not there."""
    if figures.miss is not None:
        return figures.miss
    was_written = standing.written_tokens is None or figures.reused_tokens < standing.written_tokens
    return MissReason.EVICTED if was_written else MissReason.NOT_WRITTEN


def session_as_granted(standing: Standing, figures: Figures) -> dict[str, object]:
    """What the grant knows, for a stream's first chunk."""
    known, divergence = reuse(standing, figures), standing.divergence
    return {
        "id": standing.session_id,
        "id_source": standing.id_source,
        "parent_id": standing.parent_id,
        "branch": standing.branch,
        "turn": standing.turn,
        "reused_tokens": by_tier(figures.reused),
        "woke_from": woke_from(figures.reused),
        "wake_ms": milliseconds(figures.wake_seconds),
        "wake_trigger": figures.wake_trigger,
        "queue_ms": milliseconds(figures.queue_seconds),
        "miss_reason": known.miss_reason,
        "diverged_at": known.diverged_at,
        "diverged": asdict(divergence) if divergence else None,
    }


def session(standing: Standing, figures: Figures) -> dict[str, object]:
    """The whole `session` object, once the turn has ended."""
    known = reuse(standing, figures)
    return {
        **session_as_granted(standing, figures),
        "computed_tokens": known.computed,
        "recomputed_tokens": known.recomputed,
        "stored_tokens": figures.stored_tokens,
    }


def usage(
    standing: Standing, figures: Figures, others: Sequence[Counted] = (), reasoning_tokens: int = 0
) -> dict[str, object]:
    """OpenAI's `usage`; the details repeat what clients that drop unknown keys would miss.

    `others` answered the same request: further prompts count whole, further choices without their prompt.
    """
    prompts = [(standing, figures), *((each.standing, each.figures) for each in others if each.has_own_prompt)]
    answers = [figures, *(each.figures for each in others)]
    prompt_tokens = sum(each.prompt_tokens for each, _ in prompts)
    output_tokens = sum(each.output_tokens for each in answers)
    reused = {tier: sum(each.reused.get(tier, 0) for _, each in prompts) for tier in Tier}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(reused.values()),
            "cache_write_tokens": sum(each.stored_tokens for each in answers),
            "reused_tokens": by_tier(reused),
            "miss_reason": reuse(standing, figures).miss_reason,
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def timings(standing: Standing, figures: Figures) -> dict[str, object]:
    """llama-server's `timings`.

    The first token comes with the prompt's last step, so the rate of prediction counts the tokens after it.
    """
    first = figures.first_token_at if figures.first_token_at is not None else figures.last_token_at
    prompt_seconds = max(0.0, first - (figures.granted_at or 0.0))
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


def log_fields(outcome: str, standing: Standing, figures: Figures, seconds: float) -> dict[str, object]:
    """One log line: ids, counts and reasons; never text of a prompt or an answer."""
    known = reuse(standing, figures)
    first = figures.first_token_at
    return {
        "session": standing.session_id,
        "source": standing.id_source,
        "branch": standing.branch,
        "turn": standing.turn,
        "outcome": outcome,
        "prompt": standing.prompt_tokens,
        "output": figures.output_tokens,
        **{f"reused_{tier}": tokens for tier, tokens in by_tier(figures.reused).items()},
        "recomputed": known.recomputed if figures.ran else 0,
        "computed": known.computed if figures.ran else 0,
        "stored": figures.stored_tokens,
        "queue_ms": milliseconds(figures.queue_seconds),
        "wake_ms": milliseconds(figures.wake_seconds),
        "wake": figures.wake_trigger,
        "ttft_ms": None if first is None else milliseconds(first),
        "total_ms": milliseconds(seconds),
        "miss": known.miss_reason if figures.ran else None,
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
