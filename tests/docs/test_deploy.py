"""What deploy/ and the Compose file ask for is there. What needs Prometheus or an engine is in tests/clients."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from app.settings import Settings
from tests.docs import promql

ROOT = Path(__file__).parents[2]


def compose() -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return told


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(promql.ALERTS.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


EXPRESSIONS = [*promql.of_dashboard(), *promql.of_page(), *(rule["expr"] for rule in alerts())]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_metrics_labels_and_values_that_exist(expression: str) -> None:
    assert promql.faults(expression) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(dormouse_tuns_total[5m])", "there is no dormouse_tuns_total"),
        ('dormouse_tier_health{file="x"}', "dormouse_tier_health has no label file"),
        ('dormouse_misses_total{reason=~"evicted|bad_luck"}', "dormouse_misses_total has no reason=bad_luck"),
        ('dormouse_wake_seconds_bucket{le="0.11"}', "dormouse_wake_seconds_bucket has no le=0.11"),
        ("1 + 1", "1 + 1 asks for nothing of ours"),
    ],
)
def test_an_expression_that_asks_for_something_else_is_found_out(expression: str, fault: str) -> None:
    assert promql.faults(expression) == [fault]


def test_every_alert_says_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_the_dashboards_panels_have_each_their_place() -> None:
    panels: list[dict[str, Any]] = promql.dashboard()["panels"]  # type: ignore[assignment]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    service = compose()["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/dormouse.yml").read_text())[
        "providers"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].startswith(provider["options"]["path"])
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    for folder in mounts:
        assert not folder.startswith("./") or (ROOT / folder).is_dir()


def test_prometheus_scrapes_the_gateway_by_a_name_that_it_answers_to() -> None:
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    ((target,),) = (each["targets"] for each in job["static_configs"])
    host, port = target.split(":")
    service = compose()["services"][host]
    assert service["environment"]["DORMOUSE_ALLOWED_HOST"] == host
    assert service["ports"] == [f"127.0.0.1:{port}:8000"]


def test_the_gateway_is_alone_by_default_and_nothing_is_published_beyond_this_machine() -> None:
    services = compose()["services"]
    assert [name for name, service in services.items() if "profiles" not in service] == ["dormouse"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert set(re.findall(r"^(\w[\w-]*):/", "\n".join(service["volumes"]), re.MULTILINE)) <= set(
            compose()["volumes"]
        )


def test_whoever_stops_the_server_waits_longer_than_it_drains() -> None:
    grace = compose()["services"]["dormouse"]["stop_grace_period"]
    (unit,) = re.findall(r"^TimeoutStopSec=(\d+)s$", (ROOT / "deploy/dormouse.service").read_text(), re.MULTILINE)
    # Above the drain itself: what is still to be written, and threads to be ended.
    assert min(int(grace.removesuffix("s")), int(unit)) >= Settings().drain_seconds + 10


def test_the_image_runs_as_a_user_without_privileges_and_asks_how_it_does() -> None:
    text = (ROOT / "Dockerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER (?!root|0)\S+$", last, re.MULTILINE)
    assert "HEALTHCHECK" in last
    assert "/readyz" in last
    assert "ARG ACCELERATOR=cpu\n" in text
