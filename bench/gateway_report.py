"""What `bench gateway` found: a table for people, a part for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.gateway_run import GOAL_EVENT_SECONDS, GOAL_LAG_SECONDS
from bench.report import spread
from bench.stats import summary

if TYPE_CHECKING:
    from bench.gateway_run import GatewaySamples


def table(samples: GatewaySamples) -> Group:
    """For people."""
    plan = samples.plan
    rows = Table()
    for column in ("", "median of windows", "goal"):
        rows.add_column(column, justify="left" if not column else "right")
    rows.add_row(
        "CPU of an event, us", spread(summary(samples.event_seconds).scaled(1e6)), f"{GOAL_EVENT_SECONDS * 1e6:.0f}"
    )
    for percentile in (50, 99):
        goal = f"{GOAL_LAG_SECONDS * 1e3:.0f}" if percentile == 99 else ""
        rows.add_row(
            f"lag of the loop, p{percentile} ms", spread(summary(_lags(samples, percentile)).scaled(1e3)), goal
        )
    rows.add_row("CPU of a request beside its events, us", spread(summary(samples.request_seconds).scaled(1e6), 0), "")
    rows.add_row("events a second, published", spread(summary(samples.events_per_second), 0), "")
    rows.add_row("tokens merged into an event of others, %", spread(summary(samples.merged_share).scaled(100)), "0")
    title = (
        f"gateway alone: {plan.streams} streams of {plan.tokens} tokens, {plan.events_per_second:,} events a second in "
        f"{plan.steps_per_second:.1f} steps, {plan.repeats} windows"
    )
    return Group(Text(title), rows)


def part(samples: GatewaySamples) -> dict[str, Any]:
    """Every window but its single lags."""
    told = asdict(samples)
    del told["lag_seconds"]
    return {
        **told,
        "summary": {
            "event_seconds": asdict(summary(samples.event_seconds)),
            "request_seconds": asdict(summary(samples.request_seconds)),
            "events_per_second": asdict(summary(samples.events_per_second)),
            "merged_share": asdict(summary(samples.merged_share)),
            "lag_p50_seconds": asdict(summary(_lags(samples, 50))),
            "lag_p99_seconds": asdict(summary(_lags(samples, 99))),
            "goal_event_seconds": GOAL_EVENT_SECONDS,
            "goal_lag_p99_seconds": GOAL_LAG_SECONDS,
        },
    }


def _lags(samples: GatewaySamples, percentile: int) -> list[float]:
    return [float(np.percentile(lags, percentile)) for lags in samples.lag_seconds]
