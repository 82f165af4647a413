"""docs/metrics.md is what `/metrics` exposes, from the first scrape on and whatever clients send."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.docs import pages
from tests.faults.server import Talk

if TYPE_CHECKING:
    from tests.faults.server import Server

UNITS = ("_seconds", "_bytes", "_tokens", "_blocks", "_slots")
COUNTED = {
    "branches",
    "catalog_faults",
    "catalog_health",
    "catalog_pending",
    "hints",
    "misses",
    "model_info",
    "sessions",
    "snapshot",
    "suspensions",
    "tier_health",
    "tokens",
    "transfers",
    "transfers_unsound",
    "turns",
    "turns_running",
    "turns_suspended",
    "turns_waiting",
}
"""Metrics whose name is the thing that is counted, or a state."""

EVIL = ('"} 1\nforged_total 7', "x" * 200, "<script>alert(1)</script>", "../../metrics")


def scrape(server: Server) -> str:
    return server.http.get("/metrics").text


def series(exposed: str) -> set[tuple[str, ...]]:
    """Each by its name and labels."""
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
        for family in pages.families(exposed)
        for sample in family.samples
    }


def test_the_page_has_every_metric_label_and_bound_as_it_is(server: Server) -> None:
    assert pages.made("metrics.md") == pages.metric_tables(scrape(server))


def test_every_series_is_there_before_the_first_turn_and_no_client_makes_another(server: Server) -> None:
    before = series(scrape(server))
    talk = Talk("a dormouse")
    for _ in range(2):
        server.say(talk)
    server.asleep(talk)
    server.say(talk)
    for evil in EVIL:
        body = {"model": evil, "messages": [{"role": "user", "content": evil}], "session_id": evil, "max_tokens": 1}
        server.http.post("/v1/chat/completions", json=body)
        server.http.post("/v1/chat/completions", json=body | {"model": "tiny", "user": evil, "session_id": "evil"})
        server.http.post("/v1/sessions/evil/wake", json={"branch": 7, "to": evil})
        server.http.get("/v1/sessions/evil", headers={"user-agent": repr(evil)})
    assert server.metric("dormouse_turns_total", outcome="length") >= 3
    assert server.metric("dormouse_wake_seconds_count", trigger="arrival", source="nvme") == 1
    assert series(scrape(server)) == before


def test_names_have_their_unit_and_every_metric_its_help(server: Server) -> None:
    for family in pages.families(scrape(server)):
        assert family.documentation.endswith("."), family
        if not family.name.startswith(pages.OWN):
            continue
        name = family.name.removeprefix(pages.OWN)
        assert re.fullmatch(r"[a-z_]+", name)
        assert name in COUNTED or name.endswith(UNITS) or name.startswith("blocks_"), name
        assert not name.endswith(("_ms", "_milliseconds", "_kib", "_percent")), name
