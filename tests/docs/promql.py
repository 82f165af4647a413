"""What expressions in Prometheus' language ask for, held against what docs/metrics.md says is exposed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.docs import pages

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/dormouse.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
OUTSIDE = {"up", "process_start_time_seconds"}
ADDED = ("instance", "job")
"""Labels that a scrape adds."""


def exposed() -> dict[str, dict[str, set[str]]]:
    """Every metric by the name it is asked for, with its labels and their values; of free labels none are told."""
    made = pages.made("metrics.md")
    found: dict[str, dict[str, set[str]]] = {}
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", made["metrics"], re.MULTILINE):
        values = {label: _values(made["labels"], name, label) for label in re.findall(r"`(\w+)`", labels)}
        if kind != "histogram":
            found[name] = values
            continue
        (bounds,) = re.findall(rf"^\| `{name}` \| (.*) \|$", made["buckets"], re.MULTILINE)
        found[f"{name}_bucket"] = {**values, "le": set(bounds.split(", "))}
        found[f"{name}_count"] = found[f"{name}_sum"] = values
    return found


def _values(table: str, name: str, label: str) -> set[str]:
    rows = re.findall(rf"^\| `{name}` \| `{label}` \| (.*) \|$", table, re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", rows[0])) if rows else set()


def faults(expression: str) -> list[str]:
    """What an expression asks for and would never get."""
    known, found = exposed(), []
    asked = re.findall(r"\b((?:dormouse|process)_\w+|up)\b(?:\{([^}]*)\})?", expression)
    if not asked:
        found.append(f"{expression} asks for nothing of ours")
    for name, matchers in asked:
        if name in OUTSIDE:
            continue
        if name not in known:
            found.append(f"there is no {name}")
            continue
        for label, operator, value in re.findall(r"(\w+)(=~|!~|!=|=)\"([^\"]*)\"", matchers):
            if label in ADDED:
                continue
            values = known[name].get(label)
            if values is None:
                found.append(f"{name} has no label {label}")
            for each in value.split("|") if operator.endswith("~") else [value]:
                if values and each not in values:
                    found.append(f"{name} has no {label}={each}")
    return found


def dashboard() -> dict[str, object]:
    told: dict[str, object] = json.loads(DASHBOARD.read_text())
    return told


def of_dashboard() -> list[str]:
    panels: list[dict[str, list[dict[str, str]]]] = dashboard()["panels"]  # type: ignore[assignment]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def of_page() -> list[str]:
    return [
        text.strip() for text in re.findall(r"```promql\n(.*?)```", (pages.DOCS / "metrics.md").read_text(), re.DOTALL)
    ]
