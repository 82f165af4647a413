"""The verdict: which rule speaks, with which numbers, and what it says to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.admin.verdict import GIB, MIB, Facts, TierFacts, judge, roomier

BUSY = Facts(
    turns=500,
    turns_ever=900,
    reused=96_000,
    recomputed=4_000,
    wakes=212,
    wake_p95_seconds=0.081,
    saved_seconds=9661.0,
    sessions=40,
    nvme=TierFacts(capacity=20 * GIB, used=8 * GIB),
    max_queue=1024,
    wake_deadline_seconds=10.0,
)
FULL = TierFacts(capacity=20 * GIB, used=20 * GIB)


def test_a_server_that_does_its_work_says_so_with_its_numbers() -> None:
    verdict = judge(BUSY)
    assert (verdict.rule, verdict.level, verdict.flag) == ("working", "working", None)
    assert verdict.sentence == (
        "Working: 96% of history reused in the last hour, 212 wakes, p95 81 ms, about 2 h 41 min of prefill saved."
    )


def test_a_full_nvme_that_loses_history_names_the_flag_and_a_value() -> None:
    lost = {"evicted": 6_200, "expired": 13_800}
    verdict = judge(replace(BUSY, nvme=FULL, lost=lost, evicted_bytes=20 * GIB))
    assert (verdict.rule, verdict.level) == ("nvme_full", "change")
    assert (verdict.flag, verdict.value) == ("--nvme-bytes", "64GiB")
    assert verdict.sentence == (
        "Change this: 31% of lost tokens were dropped because NVMe is full; set --nvme-bytes 64GiB (now 20 GiB)."
    )


def test_a_full_nvme_that_loses_next_to_nothing_is_no_reason_to_change_anything() -> None:
    assert judge(replace(BUSY, nvme=FULL, lost={"evicted": 300})).rule == "working"
    assert judge(replace(BUSY, lost={"evicted": 50_000})).rule == "working", "there was room: it is not what is lacking"


@pytest.mark.parametrize(
    ("change", "rule", "flag"),
    [
        ({"is_draining": True}, "draining", None),
        ({"disk_reasons": ("I/O error",)}, "disk_fails", "--nvme-dir"),
        ({"lost": {"corrupt": 9_000}}, "reads_fail", "--nvme-dir"),
        ({"refused": 40}, "queue_full", "--max-queue"),
        ({"lost": {"load_timeout": 9_000}}, "wakes_late", "--wake-deadline-seconds"),
        ({"lost": {"not_written": 9_000}, "writes_every_turn": False}, "not_written", "--nvme-write-policy"),
        ({"lost": {"not_written": 9_000}}, "working", None),
        ({"lost_by_clients": 200_000, "worst_client": "some-agent"}, "clients_diverge", None),
        ({"turns": 0}, "quiet", None),
        (
            {"nvme": TierFacts(), "dram": TierFacts(4 * GIB, 4 * GIB), "lost": {"evicted": 20_000}},
            "dram_full",
            "--dram-bytes",
        ),
        ({"nvme": TierFacts(), "lost": {"evicted": 20_000}}, "nvme_full", "--nvme-bytes"),
    ],
)
def test_the_worst_that_applies_speaks(change: dict[str, object], rule: str, flag: str | None) -> None:
    verdict = judge(replace(BUSY, **change))  # type: ignore[arg-type]
    assert (verdict.rule, verdict.flag) == (rule, flag)
    assert verdict.sentence.endswith(".")
    if verdict.value is not None:
        assert f"{verdict.flag} {verdict.value}" in verdict.sentence


def test_the_client_that_changes_history_is_named() -> None:
    verdict = judge(replace(BUSY, lost_by_clients=200_000, worst_client="some-agent"))
    assert "68% of history" in verdict.sentence
    assert "some-agent" in verdict.sentence


def test_a_server_nobody_has_asked_yet_says_what_to_do() -> None:
    assert judge(Facts()).sentence == "Asleep: no turn yet. Send one, and it shows here."
    assert judge(Facts(turns=3, turns_ever=3)).sentence.startswith("Working: 3 turns in the last hour, none of which")


@pytest.mark.parametrize(
    ("capacity", "evicted", "value"),
    [(0, 0, "64MiB"), (4 * MIB, 0, "64MiB"), (20 * GIB, 0, "48GiB"), (20 * GIB, 20 * GIB, "64GiB"), (GIB, 0, "2GiB")],
)
def test_a_roomier_budget_holds_what_is_there_and_what_was_dropped(capacity: int, evicted: int, value: str) -> None:
    assert roomier(capacity, evicted) == value
