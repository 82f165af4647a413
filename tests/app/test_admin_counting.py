"""What turns count for in the minutes behind /admin, and what windows make of it."""

from __future__ import annotations

import gc

import pytest
from prometheus_client import CollectorRegistry, Histogram

from app.admin import counting
from app.admin.minutes import Minutes, quantile
from app.admin.prefetches import MOST_OPEN, Prefetches
from app.admin.tiles import Now, hours_left, in_one_unit, tiles
from app.admin.turn_log import Text, TurnLog, turn_note
from app.admin.windows import window
from app.metrics import LATENCY_BUCKETS
from app.report import Figures, Standing, reuse
from app.user_agents import client_name
from kvstore.reuse import MissReason
from kvstore.session import Session
from kvstore.types import Tier


def standing(**more: object) -> Standing:
    defaults: dict[str, object] = {
        "session_id": "s",
        "id_source": "body",
        "parent_id": None,
        "branch": 0,
        "turn": 2,
        "prompt_tokens": 1000,
        "history_tokens": 801,
        "shared_tokens": 801,
        "is_known_session": True,
        "block_tokens": 16,
        "cache": True,
        "divergence": None,
    }
    return Standing(**(defaults | more))  # type: ignore[arg-type]


def figures(**more: object) -> Figures:
    return Figures(**({"granted_at": 0.1, "first_token_at": 0.3, "reused": {Tier.HBM: 800}} | more))  # type: ignore[arg-type]


def amounts(about: Standing, did: Figures, outcome: str = "stop", rate: float = 100.0) -> dict[str, float]:
    found = counting.turn_amounts(outcome, about, did, reuse(about, did), rate)
    return {name: amount for name, amount in found.items() if amount}


# --- one turn ----------------------------------------------------------------------------------


def test_a_turn_that_never_left_hbm_saves_the_prefill_of_its_history() -> None:
    found = amounts(standing(), figures())
    assert found["reused_hbm"] == 800
    assert found["saved_seconds"] == 8.0
    assert "wakes" not in found
    assert [name for name in found if name.startswith("first_token")] == ["first_token_hbm_5"]


def test_a_wake_is_taken_off_what_it_saved() -> None:
    found = amounts(standing(), figures(reused={Tier.HBM: 400, Tier.NVME: 400}, wake_seconds=0.08, wake_trigger="hint"))
    assert found["saved_seconds"] == pytest.approx(7.92)
    assert found["wakes"] == 1
    assert found["wake_6"] == 1, "between 50 and 100 ms"
    assert found["first_token_nvme_5"] == 1


def test_what_had_to_go_is_lost_by_us_and_what_was_edited_by_its_client() -> None:
    evicted = amounts(standing(), figures(reused={Tier.HBM: 160}))
    assert (evicted["lost_evicted"], evicted["miss_evicted"], evicted["recomputed"]) == (640, 1, 640)
    edited = amounts(standing(shared_tokens=200), figures(reused={Tier.HBM: 192}))
    assert edited["lost_prompt_diverged"] == 600
    assert edited["miss_prompt_diverged"] == 1


def test_a_session_that_expired_as_a_whole_lost_its_whole_prompt() -> None:
    gone = standing(history_tokens=0, shared_tokens=0, is_known_session=False, gone=MissReason.EXPIRED)
    assert amounts(gone, figures(reused={}))["lost_expired"] == 1000


def test_beginnings_and_a_cheaper_recompute_are_no_losses() -> None:
    first = standing(history_tokens=0, shared_tokens=0, is_known_session=False)
    found = amounts(first, figures(reused={}))
    assert found["miss_new_session"] == 1
    assert not [name for name in found if name.startswith(("lost", "first_token"))]
    chosen = amounts(standing(), figures(reused={}, miss=MissReason.RECOMPUTE_CHEAPER))
    assert not [name for name in chosen if name.startswith("lost")]


def test_a_refused_turn_counts_as_refused_and_as_nothing_else() -> None:
    refused = Figures()
    assert amounts(standing(), refused, "queue_full") == {"refused": 1.0}
    assert amounts(standing(), refused, "cancelled") == {}


# --- minutes --------------------------------------------------------------------------------------


def test_windows_forget_minute_by_minute() -> None:
    minutes = Minutes(("a", "b"), kept=5)
    for minute in range(4):
        minutes.add(minute, {"a": 10.0**minute})
    assert minutes.sums(3, 2) == {"a": 1100.0, "b": 0.0}
    assert minutes.sums(3, 5)["a"] == 1111.0
    minutes.add(3, {"a": 5.0, "b": 1.0})
    assert minutes.sums(3, 2) == {"a": 1105.0, "b": 1.0}, "the minute that runs is counted at once"
    assert minutes.sums(7, 5)["a"] == 1005.0
    assert minutes.sums(8, 5) == {"a": 0.0, "b": 0.0}


def test_a_series_has_a_point_for_each_step_and_zeros_where_nothing_was() -> None:
    minutes = Minutes(("a",), kept=8)
    minutes.add(1, {"a": 1.0})
    minutes.add(4, {"a": 2.0})
    assert minutes.series(5, 6, ["a"]) == {"a": [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]}
    assert minutes.series(5, 6, ["a"], step=3) == {"a": [1.0, 2.0]}


def test_a_day_of_minutes_takes_little_memory() -> None:
    assert Minutes(counting.NAMES).num_bytes < 4 * 1024**2


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_quantile_is_the_one_prometheus_tells_from_the_same_buckets(share: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "h", buckets=LATENCY_BUCKETS, registry=registry)
    seen = [0.004, 0.02, 0.03, 0.03, 0.2, 0.9, 3.0, 7.0, 8.0, 40.0]
    for each in seen:
        histogram.observe(each)
    cumulative = [sample.value for family in registry.collect() for sample in family.samples if "bucket" in sample.name]
    counts = [count - below for count, below in zip(cumulative, [0.0, *cumulative], strict=False)]
    bounds = tuple(map(float, LATENCY_BUCKETS))
    found = quantile(bounds, counts, share)
    # histogram_quantile, as its documentation has it.
    rank = share * cumulative[-1]
    index = next(place for place, total in enumerate(cumulative) if total >= rank)
    lower = bounds[index - 1] if index else 0.0
    within = (rank - (cumulative[index] - counts[index])) / counts[index]
    assert found == pytest.approx(lower + (bounds[index] - lower) * within)
    assert quantile(bounds, [0.0] * len(counts), share) is None
    assert quantile(bounds, [0.0] * (len(counts) - 1) + [1.0], share) == bounds[-1]


# --- tiles ------------------------------------------------------------------------------------------


def sums(**more: float) -> dict[str, float]:
    return {**dict.fromkeys(counting.NAMES, 0.0), **more}


def shown(now: Now | None = None, **counted: float) -> dict[str, tuple[str, str]]:
    made = tiles(window(sums(**counted), 0, True), now or Now())
    return {tile.key: (tile.value, tile.detail) for tile in made}


def test_there_are_ten_numbers_and_each_has_a_form_for_nothing() -> None:
    empty = shown()
    assert len(empty) == 10
    assert empty["reused"] == ("\N{EN DASH}", "no turn had a history")
    assert empty["lost_by_us"] == ("0", "nothing was")
    assert empty["headroom"][0] == "\N{EN DASH}"


def test_numbers_say_what_they_are_made_of() -> None:
    found = shown(
        Now(kept=212, kept_by_tier=(12, 60, 140), kept_tokens=340_000, hbm_tokens=20_000),
        reused_hbm=60,
        reused_nvme=36,
        recomputed=4,
        lost_evicted=900,
        lost_expired=50,
        saved_seconds=9661.0,
        prefetch_useful=3,
        prefetch_late=2,
        prefetch_wasted=1,
        wake_6=98,
        wake_8=2,
        wakes=100,
    )
    assert found["reused"] == ("96%", "96 of 100 tokens")
    assert found["saved"][0] == "2 h 41 min"
    assert found["kept"][1].endswith("17\N{MULTIPLICATION SIGN} HBM")
    assert found["lost_by_us"] == ("950", "900 evicted \N{MIDDLE DOT} 50 expired")
    assert found["prefetches"] == ("3", "2 late \N{MIDDLE DOT} 1 wasted")
    assert found["wakes"][1] == "100 wakes \N{MIDDLE DOT} 98% within 100 ms"


def test_hours_left_are_those_until_the_lowest_tier_is_full_at_this_pace() -> None:
    now = Now(free_blocks_below=600, blocks_below=1000, window_hours=0.5)
    assert hours_left(window(sums(published=100.0), 0, True), now) == 3.0
    assert hours_left(window(sums(), 0, True), now) is None
    full = Now(free_blocks_below=10, blocks_below=1000)
    assert hours_left(window(sums(published=100.0, displaced=1.0), 0, True), full) == 0.0


def test_latencies_side_by_side_share_a_unit() -> None:
    assert in_one_unit(0.0015, 0.017, 0.031) == "1.5 / 17 / 31 ms"
    assert in_one_unit(0.3, 1.2, 12.0) == "0.3 / 1.2 / 12 s"


# --- who asked ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("OpenAI/Python 2.0.1", "OpenAI/Python"),
        ("claude-cli/1.0.5 (external, cli)", "claude-cli"),
        ("curl/8.5.0", "curl"),
        ("python-httpx/0.28.1", "python-httpx"),
        (None, "unknown"),
        ("<script>alert(1)</script>", "unknown"),
        ("x" * 500, "x" * 40),
    ],
)
def test_a_client_goes_by_its_product_without_a_version(said: str | None, name: str) -> None:
    assert client_name(said) == name


# --- hints ---------------------------------------------------------------------------------------------


def test_a_hint_is_useful_late_or_wasted() -> None:
    hints = Prefetches()
    a, b, c, d = (("", name, 0) for name in "abcd")
    for which in (a, b, c, d):
        hints.given(which, 30.0)
    assert hints.turn_came(a, "hint") == "useful"
    assert hints.turn_came(b, "arrival") == "late"
    assert hints.turn_came(b, "hint") is None, "it was counted"
    hints.withdrawn(c)
    assert hints.take_wasted(29.0) == 0
    assert hints.take_wasted(30.0) == 1
    assert len(hints) == 0


def test_hints_that_are_followed_are_bounded() -> None:
    hints = Prefetches()
    for number in range(MOST_OPEN + 10):
        hints.given(("", str(number), 0), 1.0)
    assert len(hints) == MOST_OPEN


# --- the log ---------------------------------------------------------------------------------------------


def note(session: Session, turn: int) -> object:
    return turn_note("stop", standing(turn=turn), figures(), at=1.0, seconds=0.5, number=session.serial)


def session(serial: int = 0) -> Session:
    return Session("", f"s{serial}", serial, 0.0)


def test_the_log_holds_so_many_turns_in_all_and_the_oldest_go_first() -> None:
    log, busy, quiet = TurnLog(most=5), session(0), session(1)
    log.note(note(quiet, 1), quiet)  # type: ignore[arg-type]
    for turn in range(1, 6):
        log.note(note(busy, turn), busy)  # type: ignore[arg-type]
    assert log.of(quiet) == []
    assert [each["turn"] for each in log.of(busy)] == [5, 4, 3, 2, 1]
    assert len(log.last()) == 6
    for turn in range(6, 40):
        log.note(note(busy, turn), busy)  # type: ignore[arg-type]
    assert len(log.of(busy)) == 5
    assert len(log.last()) == 20


def test_what_was_logged_of_a_session_goes_with_it() -> None:
    log, gone = TurnLog(), session()
    text = Text(1, "what was said", "what came")
    log.note(note(gone, 1), gone, text)  # type: ignore[arg-type]
    assert log.of(gone)[0]["diverged"] == {"message_index": 1, "stored": "what was said", "received": "what came"}
    del gone, text
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Text and each.stored == "what was said"]
    forgotten = session(1)
    forgotten.is_forgotten = True
    log.note(note(forgotten, 2), forgotten, Text(1, "a", "b"))  # type: ignore[arg-type]
    assert log.of(forgotten) == []
