"""Accounting for a prompt: a table of deliberate cases, and the law that its parts add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.reuse import MissReason, account

BLOCK = 32


@pytest.mark.parametrize(
    ("case", "prompt", "history", "shared", "reused", "recomputed", "computed", "reason", "diverged_at"),
    [
        ("first turn", 100, 0, 0, 0, 0, 100, "new_session", None),
        ("first turn, system prompt shared with others", 100, 0, 0, 64, 0, 36, "new_session", None),
        ("append, warm", 150, 120, 120, 96, 23, 31, None, None),
        ("append, the history ends on a block", 150, 128, 128, 96, 31, 23, None, None),
        ("append, the history ends one past a block", 150, 129, 129, 128, 0, 22, None, None),
        ("append to less than a block", 40, 20, 20, 0, 19, 21, None, None),
        ("append, everything evicted", 150, 120, 120, 0, 119, 31, "evicted", None),
        ("append, the last block evicted", 150, 120, 120, 64, 55, 31, "evicted", None),
        ("an early message edited", 150, 120, 40, 32, 8, 110, "prompt_diverged", 40),
        ("an early message edited, and evicted", 150, 120, 40, 0, 40, 110, "evicted", 40),
        ("the last message edited, within the tail", 120, 120, 110, 96, 14, 10, None, 110),
        ("first answer regenerated", 80, 120, 80, 64, 16, 0, "prompt_diverged", 80),
        ("a later answer regenerated", 300, 340, 300, 288, 12, 0, "prompt_diverged", 300),
        ("the last answer regenerated, short", 100, 104, 100, 96, 4, 0, None, 100),
        ("a shorter history", 70, 120, 70, 64, 6, 0, "prompt_diverged", 70),
        ("a shorter history that ends on a block", 64, 120, 64, 32, 32, 0, "prompt_diverged", 64),
        ("a shorter history, evicted", 70, 120, 70, 0, 70, 0, "evicted", 70),
        ("a title prompt on the same id", 90, 0, 0, 32, 0, 58, "new_branch", None),
        ("more reused than this branch had, by another's blocks", 150, 120, 40, 96, 0, 54, "prompt_diverged", 40),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_each_case_is_accounted_for(
    case: str,
    prompt: int,
    history: int,
    shared: int,
    reused: int,
    recomputed: int,
    computed: int,
    reason: str | None,
    diverged_at: int | None,
) -> None:
    found = account(
        prompt_tokens=prompt,
        history_tokens=history,
        shared_tokens=shared,
        reused_tokens=reused,
        block_tokens=BLOCK,
        is_known_session=reason != "new_session",
    )
    assert (found.reused, found.recomputed, found.computed) == (reused, recomputed, computed)
    assert found.miss_reason == reason
    assert found.diverged_at == diverged_at


def test_a_turn_that_wants_no_cache_says_so() -> None:
    found = account(
        prompt_tokens=150, history_tokens=120, shared_tokens=120, reused_tokens=0, block_tokens=BLOCK, cache=False
    )
    assert found.miss_reason is MissReason.CACHE_DISABLED
    assert found.recomputed == 119


@given(data=st.data(), history=st.integers(0, 200), prompt=st.integers(1, 200), block=st.sampled_from([1, 16, 32]))
def test_the_parts_add_up_and_a_miss_is_null_exactly_when_every_storable_block_was_reused(
    data: st.DataObject, history: int, prompt: int, block: int
) -> None:
    shared = data.draw(st.integers(0, min(history, prompt)))
    reused = data.draw(st.integers(0, (prompt - 1) // block)) * block
    found = account(
        prompt_tokens=prompt, history_tokens=history, shared_tokens=shared, reused_tokens=reused, block_tokens=block
    )
    assert found.reused + found.recomputed + found.computed == prompt
    assert min(found.reused, found.recomputed, found.computed) >= 0
    is_whole = history > 0 and min(reused, shared // block * block) >= (history - 1) // block * block
    assert (found.miss_reason is None) == is_whole
