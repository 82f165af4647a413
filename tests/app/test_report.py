"""The arithmetic of `session`, `usage` and `timings`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from openai.types import CompletionUsage

from app import report
from app.report import Divergence, Figures, Standing
from kvstore.types import Tier

BLOCK = 32
WARM = Standing(
    session_id="run-42/planner",
    id_source="header:x-session-id",
    parent_id="run-42",
    branch=0,
    turn=7,
    prompt_tokens=130,
    history_tokens=110,
    had_tokens=110,
    absence=None,
    divergence=None,
    cache=True,
)
NEW = replace(WARM, history_tokens=0, had_tokens=0, absence="new_session", turn=1)
EDITED = replace(WARM, had_tokens=70, divergence=Divergence(70, 2, "stored" * 40, "received"))


def figures(reused: int, output: int = 10) -> Figures:
    return Figures(reused={Tier.HBM: reused}, output_tokens=output, stored_tokens=32)


@pytest.mark.parametrize("standing", [WARM, NEW, EDITED])
@pytest.mark.parametrize("reused", [0, 32, 64, 96])
def test_reused_recomputed_and_computed_are_all_positions(standing: Standing, reused: int) -> None:
    done = figures(reused)
    parts = (
        done.reused_tokens,
        report.recomputed_tokens(standing, done),
        report.computed_tokens(standing, done),
    )
    assert sum(parts) == standing.prompt_tokens + done.output_tokens
    assert min(parts) >= 0


def test_a_warm_turn_recomputes_only_the_tail_of_its_last_block() -> None:
    done = figures(96)
    assert report.recomputed_tokens(WARM, done) == 110 - 96
    assert report.computed_tokens(WARM, done) == 20 + 10
    assert report.miss_reason(WARM, done, BLOCK) is None


@pytest.mark.parametrize(
    ("standing", "reused", "reason"),
    [
        (NEW, 0, "new_session"),
        (NEW, 64, "new_session"),  # a shared system prompt is no history
        (replace(NEW, absence="new_branch"), 64, "new_branch"),
        (WARM, 96, None),
        (WARM, 64, "evicted"),
        (WARM, 0, "evicted"),
        (EDITED, 64, "prompt_diverged"),
        (EDITED, 32, "evicted"),
        (replace(EDITED, had_tokens=100), 96, None),  # only the unstored tail differs
        (replace(WARM, cache=False), 0, "cache_disabled"),
        (replace(NEW, cache=False), 0, "cache_disabled"),
    ],
)
def test_miss_reason_is_null_exactly_when_every_storable_block_was_reused(
    standing: Standing, reused: int, reason: str | None
) -> None:
    assert report.miss_reason(standing, figures(reused), BLOCK) == reason
    assert reason is None or reason in report.MISS_REASONS


def test_the_session_object_has_every_key_of_the_design() -> None:
    done = report.session(EDITED, figures(64), BLOCK)
    assert sorted(done) == sorted(
        [
            "id",
            "id_source",
            "parent_id",
            "branch",
            "turn",
            "reused_tokens",
            "computed_tokens",
            "recomputed_tokens",
            "stored_tokens",
            "woke_from",
            "wake_ms",
            "wake_trigger",
            "queue_ms",
            "miss_reason",
            "diverged_at",
            "diverged",
        ]
    )
    assert done["reused_tokens"] == {"hbm": 64, "dram": 0, "nvme": 0}
    assert done["woke_from"] == "hbm"
    assert done["diverged_at"] == 70
    assert done["diverged"] == {"message_index": 2, "stored": ("stored" * 40)[:80], "received": "received"}


def test_the_first_chunk_tells_what_the_grant_knows() -> None:
    early = report.session_as_granted(NEW, figures(0, output=0), BLOCK)
    assert early["woke_from"] is None
    assert "computed_tokens" not in early


def test_woke_from_is_the_deepest_tier() -> None:
    assert report.woke_from({Tier.HBM: 32, Tier.DRAM: 32, Tier.NVME: 0}) == "dram"


def test_usage_is_openais_and_repeats_the_tiers() -> None:
    usage = report.usage(WARM, figures(96), BLOCK)
    CompletionUsage.model_validate(usage, strict=True)
    assert usage["total_tokens"] == 140
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 96,
        "cache_write_tokens": 32,
        "reused_tokens": {"hbm": 96, "dram": 0, "nvme": 0},
        "miss_reason": None,
    }


def test_timings_divide_by_no_zero() -> None:
    assert report.timings(NEW, Figures())["predicted_per_second"] == 0.0
    one = Figures(granted_at=1.0, first_token_at=1.5, last_token_at=1.5, output_tokens=1)
    assert report.timings(NEW, one)["predicted_per_second"] == 0.0


def test_timings_count_the_prompt_up_to_the_first_token() -> None:
    done = Figures(reused={Tier.HBM: 30}, granted_at=1.0, first_token_at=1.5, last_token_at=2.5, output_tokens=11)
    assert report.timings(WARM, done) == {
        "cache_n": 30,
        "prompt_n": 100,
        "prompt_ms": 500.0,
        "prompt_per_second": 200.0,
        "predicted_n": 11,
        "predicted_ms": 1000.0,
        "predicted_per_second": 10.0,
    }
