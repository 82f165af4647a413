"""Series exist before their first event, and the store is read at the scrape."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import OUTCOMES, Metrics
from kvstore.snapshot import Snapshot, TierCounts, Totals, TurnCounts
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
