"""The arithmetic of `session`, `usage` and `timings`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from openai.types import CompletionUsage

from app import report
from app.report import Figures, Standing
from kvstore.types import Tier
from models.chat import Divergence

WARM = Standing(
    session_id="run-42/planner",
    id_source="header:x-session-id",
    parent_id="run-42",
    branch=0,
    turn=7,
    prompt_tokens=130,
    history_tokens=111,
    shared_tokens=111,
    is_known_session=True,
    block_tokens=32,
    cache=True,
    divergence=None,
)
NEW = replace(WARM, history_tokens=0, shared_tokens=0, is_known_session=False, turn=1)
EDITED = replace(WARM, shared_tokens=70, divergence=Divergence(2, "stored", "received"))


def figures(reused: int, output: int = 10) -> Figures:
    return Figures(reused={Tier.HBM: reused}, output_tokens=output, stored_tokens=32)


@pytest.mark.parametrize("standing", [WARM, NEW, EDITED])
@pytest.mark.parametrize("reused", [0, 32, 64, 96])
def test_every_token_of_the_prompt_is_reused_recomputed_or_computed(standing: Standing, reused: int) -> None:
    told = report.session(standing, figures(reused))
    parts = (reused, told["recomputed_tokens"], told["computed_tokens"])
    assert all(isinstance(part, int) and part >= 0 for part in parts)
    assert sum(part for part in parts if isinstance(part, int)) == standing.prompt_tokens


@pytest.mark.parametrize(
    ("standing", "reused", "reason"),
    [
        (NEW, 64, "new_session"),  # a shared system prompt is no history
        (replace(NEW, is_known_session=True), 64, "new_branch"),
        (WARM, 96, None),
        (WARM, 64, "evicted"),
        (EDITED, 64, "prompt_diverged"),
        (replace(WARM, cache=False), 0, "cache_disabled"),
    ],
)
def test_both_objects_say_why_history_was_computed_again(standing: Standing, reused: int, reason: str | None) -> None:
    assert report.session(standing, figures(reused))["miss_reason"] == reason
    details = report.usage(standing, figures(reused))["prompt_tokens_details"]
    assert isinstance(details, dict)
    assert details["miss_reason"] == reason


def test_the_session_object_has_every_key_of_the_design() -> None:
    done = report.session(EDITED, figures(64))
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
    assert done["diverged"] == {"message_index": 2, "stored": ("stored")[:80], "received": "received"}


def test_the_first_chunk_tells_what_the_grant_knows() -> None:
    early = report.session_as_granted(NEW, figures(0, output=0))
    assert early["woke_from"] is None
    assert "computed_tokens" not in early


def test_woke_from_is_the_deepest_tier() -> None:
    assert report.woke_from({Tier.HBM: 32, Tier.DRAM: 32, Tier.NVME: 0}) == "dram"


def test_usage_is_openais_and_repeats_the_tiers() -> None:
    usage = report.usage(WARM, figures(96))
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
