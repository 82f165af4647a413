"""What a turn reused of its branch, what it computed again, and why (pure).

Of a prompt of n tokens, on a branch of h tokens that shares its first `shared` with it:

    [0, reused)                     K/V was there: whole blocks
    [reused, min(shared, h - 1))    had K/V once, computed again
    [.., n)                         new; h - 1, sampled last and never computed, is among them
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MissReason(StrEnum):
    """Why history was computed again."""

    NEW_SESSION = "new_session"
    NEW_BRANCH = "new_branch"
    PROMPT_DIVERGED = "prompt_diverged"
    EVICTED = "evicted"
    NOT_WRITTEN = "not_written"
    LOAD_FAILED = "load_failed"
    LOAD_TIMEOUT = "load_timeout"
    RECOMPUTE_CHEAPER = "recompute_cheaper"
    MODEL_CHANGED = "model_changed"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    STORE_FORMAT = "store_format"
    CATALOG_LOST = "catalog_lost"
    CACHE_DISABLED = "cache_disabled"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of one prompt: reused + recomputed + computed = its length.

    `miss_reason` is None exactly when the branch has history and every storable block of it was
    reused. `diverged_at` is the first token where prompt and history differ, None where the
    prompt goes on from the whole of it.
    """

    reused: int
    recomputed: int
    computed: int
    miss_reason: MissReason | None
    diverged_at: int | None


def account(
    *,
    prompt_tokens: int,
    history_tokens: int,
    shared_tokens: int,
    reused_tokens: int,
    block_tokens: int,
    is_known_session: bool = True,
    cache: bool = True,
) -> Reuse:
    """Account for a prompt; `history_tokens` is 0 where it begins a new branch."""
    assert shared_tokens <= min(history_tokens, prompt_tokens)
    had = max(0, min(shared_tokens, history_tokens - 1))
    recomputed = max(0, had - reused_tokens)
    return Reuse(
        reused=reused_tokens,
        recomputed=recomputed,
        computed=prompt_tokens - reused_tokens - recomputed,
        miss_reason=_why(
            prompt_tokens, history_tokens, shared_tokens, reused_tokens, block_tokens, is_known_session, cache
        ),
        diverged_at=shared_tokens if shared_tokens < history_tokens else None,
    )


def _why(
    prompt: int, history: int, shared: int, reused: int, block_tokens: int, is_known_session: bool, cache: bool
) -> MissReason | None:
    if not cache:
        return MissReason.CACHE_DISABLED
    if history == 0:
        return MissReason.NEW_BRANCH if is_known_session else MissReason.NEW_SESSION
    own = min(reused, _whole(shared, block_tokens))  # blocks beyond what is shared are another conversation's
    if own >= _whole(history - 1, block_tokens):
        return None
    # The first position lost decides: blocks that prompt and history share, or what comes after them.
    return MissReason.EVICTED if own < _whole(min(shared, prompt - 1), block_tokens) else MissReason.PROMPT_DIVERGED


def _whole(tokens: int, block_tokens: int) -> int:
    return tokens // block_tokens * block_tokens
