"""Series exist before their first event, and the store is read at the scrape."""

from __future__ import annotations

from array import array

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import OUTCOMES, Metrics
from kvstore.events import WakeStatus
from kvstore.former import Gone
from kvstore.sessions import SessionBook
from kvstore.snapshot import Snapshot, TierCounts, Totals, TurnCounts
from kvstore.transfer import Traffic
from kvstore.types import Tier


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_series_is_there_at_zero_before_first_use() -> None:
    found = samples(Metrics(["new_session", "evicted"]))
    for outcome in OUTCOMES:
        assert found["dormouse_turns_total", outcome] == 0
    for tier in ("hbm", "dram", "nvme"):
        assert found["dormouse_reused_tokens_total", tier] == 0
    for reason in ("new_session", "evicted"):
        assert found["dormouse_misses_total", reason] == 0
    for kind in ("prompt", "output"):
        assert found["dormouse_tokens_total", kind] == 0
    assert found["dormouse_first_token_seconds_count",] == 0
    for trigger in ("hint", "arrival", "queue"):
        for tier in ("dram", "nvme"):
            assert found["dormouse_wake_seconds_count", *sorted((tier, trigger))] == 0
            assert found["dormouse_wake_seconds_bucket", "0.001", *sorted((tier, trigger))] == 0
            assert found["dormouse_wake_seconds_bucket", "10.0", *sorted((tier, trigger))] == 0
    for reason in ("awake", "waking"):
        assert found["dormouse_hints_total", *sorted(("given", reason))] == 0
    for reason in (*WakeStatus, *Gone):
        outcome = "given" if reason in (WakeStatus.AWAKE, WakeStatus.WAKING) else "declined"
        assert found["dormouse_hints_total", *sorted((outcome, reason.value))] == 0


def test_two_registries_do_not_share_anything() -> None:
    first, second = Metrics([]), Metrics([])
    first.turns.labels("stop").inc()
    assert samples(first)["dormouse_turns_total", "stop"] == 1
    assert samples(second)["dormouse_turns_total", "stop"] == 0


def test_a_scrape_reads_the_store_as_it_is_then() -> None:
    metrics = Metrics([])
    waiting = 1

    def snapshot() -> Snapshot:
        tier = TierCounts(Tier.HBM, capacity=8, free=3, open=1, filling=0, valid=4, quarantined=0, pinned=2)
        return Snapshot((tier,), TurnCounts(waiting, 0, 2, 0), Totals(evicted=5))

    metrics.watch_store(snapshot)
    metrics.describe_model({"name": "m", "device": "cpu"})
    assert samples(metrics)["dormouse_turns_waiting",] == 1
    waiting = 7
    found = samples(metrics)
    assert found["dormouse_turns_waiting",] == 7
    assert found["dormouse_tier_slots", "hbm", "valid"] == 4
    assert found["dormouse_tier_capacity_slots", "hbm"] == 8
    assert found["dormouse_blocks_evicted_total",] == 5
    assert found["dormouse_model_info", "cpu", "m"] == 1


def test_a_hint_told_anything_new_is_an_error_and_not_a_series() -> None:
    metrics = Metrics([])
    for reason in ("awake", "no_room", "deleted", "rate_limited", "unknown_branch"):
        metrics.count_hint(reason)
    found = samples(metrics)
    assert found["dormouse_hints_total", "awake", "given"] == 1
    assert found["dormouse_hints_total", "declined", "no_room"] == 1
    with pytest.raises(AssertionError, match="a surprise"):
        metrics.count_hint("a surprise")


def test_every_direction_of_copies_is_there_whichever_tiers_are() -> None:
    metrics = Metrics([])
    traffic: dict[tuple[Tier, Tier], Traffic] = {}
    metrics.watch_transfers(traffic)

    def counted(source: str, target: str) -> list[float | None]:
        names = ("transfers", "transfer_blocks", "transfer_bytes", "transfer_seconds")
        labels = {"source": source, "target": target}
        return [metrics.registry.get_sample_value(f"dormouse_{name}_total", labels) for name in names]

    tiers = ("hbm", "dram", "nvme")
    ways = [(source, target) for source in tiers for target in tiers if source != target]
    assert [counted(*way) for way in ways] == [[0, 0, 0, 0]] * 6
    traffic[Tier.HBM, Tier.DRAM] = Traffic(transfers=2, blocks=9, bytes=9 * 4096, seconds=0.5)
    assert counted("hbm", "dram") == [2, 9, 9 * 4096, 0.5]
    assert counted("dram", "hbm") == [0, 0, 0, 0]


def test_sessions_and_branches_are_those_remembered_now() -> None:
    metrics, book = Metrics([]), SessionBook()
    metrics.watch_sessions(book)
    assert (samples(metrics)["dormouse_sessions",], samples(metrics)["dormouse_branches",]) == (0, 0)
    first, _second = (book.begin("", name, array("I", [1]), 0.0) for name in ("a", "b"))
    book.begin("", "a", array("I", [2]), 0.0)
    assert (samples(metrics)["dormouse_sessions",], samples(metrics)["dormouse_branches",]) == (2, 3)
    book.abandon(first)
    book.forget("", "b")
    assert (samples(metrics)["dormouse_sessions",], samples(metrics)["dormouse_branches",]) == (1, 1)
