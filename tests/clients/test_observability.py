"""Debian's own checkers, and a real Prometheus that scrapes a real server: `apt install prometheus docker-compose`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from models import embedded
from tests.clients.conftest import CHECKOUT
from tests.docs import promql
from tests.faults import tiny
from tests.faults.server import Server, Talk, serving, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.clients

WAIT_SECONDS = 60.0


def tool(name: str) -> str:
    """Where a checker is; without it the test says so."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def said(*command: str | Path, stdin: str = "") -> str:
    """What a checker says, which must be well."""
    got = subprocess.run(
        [str(word) for word in command], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    assert got.returncode == 0, got.stdout + got.stderr
    return got.stdout + got.stderr


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Server]:
    """With every tier, and sessions that have slept in each."""
    model = tiny.save(tmp_path_factory.mktemp("models") / "tiny", embedded.fetch(cache_dir, progress=print))
    with serving(settings(model, tmp_path_factory.mktemp("nvme"))) as running:
        yield running


class Turns(logging.Handler):
    """The fields of every turn's log line."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict) and "ttft_ms" in fields:
            self.fields.append(fields)


@contextmanager
def watched() -> Iterator[Turns]:
    turns, logger = Turns(), logging.getLogger("dormouse.turns")
    before = logger.level
    logger.addHandler(turns)
    logger.setLevel(logging.INFO)
    try:
        yield turns
    finally:
        logger.removeHandler(turns)
        logger.setLevel(before)


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """One that scrapes `target` each second, with our own job and rules; where it answers."""
    config = yaml.safe_load((CHECKOUT / "deploy/prometheus/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(promql.ALERTS, folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(WAIT_SECONDS)


def asked(url: str, query: str) -> float | None:
    """The one value that an expression has now; None where it has none yet."""
    try:
        reply = httpx.get(f"{url}/api/v1/query", params={"query": query}, trust_env=False)
    except httpx.ConnectError:
        return None
    result = reply.json().get("data", {}).get("result", [])
    return float(result[0]["value"][1]) if result else None


def wait_for(url: str, query: str, value: float) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := asked(url, query)) != value:
        assert time.monotonic() < deadline, f"{query} is {found}, not {value}"
        time.sleep(0.2)


def test_a_real_prometheus_tells_the_servers_own_hit_rate_and_first_tokens(tiny_server: Server, tmp_path: Path) -> None:
    target = tiny_server.live.url.removeprefix("http://")
    with watched() as turns, prometheus(tmp_path, target) as url:
        for number in range(4):
            talk = Talk(f"animal {number}")
            tiny_server.say(talk)
            tiny_server.asleep(talk)
            tiny_server.say(talk)
            tiny_server.say(talk)
        state = tiny_server.state()
        count = sum(state["turns_ended"].values())
        wait_for(url, "sum(dormouse_turns_total)", count)
        tokens = state["tokens"]
        reused = sum(tokens[tier] for tier in ("hbm", "dram", "nvme"))
        kept, again = "sum(dormouse_reused_tokens_total)", "sum(dormouse_recomputed_tokens_total)"
        hit_rate = f"{kept} / ({kept} + {again})"
        assert asked(url, hit_rate) == pytest.approx(reused / (reused + tokens["recomputed"]))
        assert asked(url, 'up{job="dormouse"}') == 1
        seconds = sorted(fields["ttft_ms"] / 1000 for fields in turns.fields)
        assert len(seconds) == count
        p95 = asked(url, "histogram_quantile(0.95, sum by (le) (dormouse_first_token_seconds_bucket))")
        assert p95 is not None
        bounds = [0.0, *sorted(float(each) for each in promql.exposed()["dormouse_first_token_seconds_bucket"]["le"])]
        mine = next(index for index, bound in enumerate(bounds) if seconds[round(0.95 * (len(seconds) - 1))] <= bound)
        theirs = next(index for index, bound in enumerate(bounds) if p95 <= bound)
        assert abs(mine - theirs) <= 1
        for expression in promql.of_page():
            assert "error" not in httpx.get(f"{url}/api/v1/query", params={"query": expression}, trust_env=False).json()


def test_promtool_finds_no_fault_with_what_is_exposed(tiny_server: Server) -> None:
    assert said(tool("promtool"), "check", "metrics", stdin=tiny_server.http.get("/metrics").text) == ""


def test_promtool_finds_no_fault_with_the_configuration_and_its_alerts() -> None:
    assert "SUCCESS" in said(tool("promtool"), "check", "config", CHECKOUT / "deploy/prometheus/prometheus.yml")


def test_promtool_reads_every_expression_of_the_dashboard_and_of_the_docs(tmp_path: Path) -> None:
    expressions = [*promql.of_dashboard(), *promql.of_page()]
    # Grafana fills these in before Prometheus sees them.
    filled = [each.replace("$__rate_interval", "1m").replace("$instance", ".*") for each in expressions]
    rules = [{"record": f"expression_{number}", "expr": each} for number, each in enumerate(filled)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    assert f"{len(rules)} rules found" in said(tool("promtool"), "check", "rules", file)


def test_compose_reads_its_file_with_and_without_the_profile() -> None:
    command = (tool("docker-compose"), "-f", CHECKOUT / "docker-compose.yml", "--project-directory", CHECKOUT)
    said(*command, "config", "--quiet")
    assert set(said(*command, "--profile", "observability", "config", "--services").split()) == {
        "dormouse",
        "grafana",
        "prometheus",
    }


def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path) -> None:
    unit = (CHECKOUT / "deploy/dormouse.service").read_text()
    file = tmp_path / "dormouse.service"
    file.write_text(unit.replace("/opt/dormouse/bin/dormouse", shutil.which("true") or "/bin/true"))
    assert said(tool("systemd-analyze"), "verify", file) == ""


def test_hadolint_finds_no_fault_with_the_image() -> None:
    hadolint = os.environ.get("HADOLINT") or tool("hadolint")
    assert said(hadolint, CHECKOUT / "Dockerfile") == ""
