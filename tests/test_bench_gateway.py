"""`bench gateway` counts what it says it counts; how much that is, a quiet machine tells."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench import gateway_run
from bench.gateway_report import part, table
from bench.gateway_run import GatewayPlan


@pytest.fixture(scope="module")
def samples() -> gateway_run.GatewaySamples:
    return gateway_run.run(GatewayPlan(streams=6, events_per_second=600, tokens=20, repeats=2), print)


def test_every_window_has_its_figures(samples: gateway_run.GatewaySamples) -> None:
    assert len(samples.event_seconds) == len(samples.request_seconds) == len(samples.lag_seconds) == 2
    assert all(0 < seconds < 0.01 for seconds in samples.event_seconds)
    assert all(0 <= share < 1 for share in samples.merged_share)


def test_both_bars_are_in_table_and_json(samples: gateway_run.GatewaySamples) -> None:
    summary = json.loads(json.dumps(part(samples)))["summary"]
    assert summary["goal_event_seconds"] == 100e-6
    assert summary["lag_p99_seconds"]["samples"] == 2
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(samples))
    assert "CPU of an event, us" in capture.get()
