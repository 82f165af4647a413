"""The tables in docs/ that are made from the code: `make docs` writes them, and tests hold what is there against them.

A table stands between two comments, `<!-- made: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from app.settings import FLAGGED, SECRETS, Panel, Settings, flag, metavar, panel, variable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

DOCS = Path(__file__).parents[2] / "docs"
OWN = "dormouse_"
FREE_LABELS = {"dormouse_model_info": ("name", "device", "dtype")}
"""Labels whose values are the operator's: one series, whatever they are."""


def made(page: str) -> dict[str, str]:
    """The tables that stand in a page, by name."""
    text = (DOCS / page).read_text()
    return dict(re.findall(r"<!-- made: (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL))


def write(page: str, tables: Mapping[str, str]) -> None:
    """Put `tables` where the page has them."""
    text = (DOCS / page).read_text()
    for name, table in tables.items():
        begin, end = f"<!-- made: {name} -->\n", "<!-- end -->"
        head, rest = text.split(begin)
        text = head + begin + table + rest[rest.index(end) :]
    (DOCS / page).write_text(text)


# --- settings -------------------------------------------------------------------------------


def settings_tables() -> dict[str, str]:
    """One for each heading of `--help`."""
    return {heading.name.lower(): _settings(heading) for heading in Panel}


def _settings(heading: Panel) -> str:
    rows = [
        (_spelled(field), f"`{variable(field)}`", _default(field), str(Settings.model_fields[field].description))
        for field in Settings.model_fields
        if panel(field) == heading
    ]
    return _table(("flag", "variable", "default", ""), rows)


def _spelled(field: str) -> str:
    if field in SECRETS:
        return "none: everybody's `ps` would show it"
    value = "" if Settings.model_fields[field].annotation is bool else f" {metavar(field)}"
    return f"`{flag(field)}{value}`"


def _default(field: str) -> str:
    info = Settings.model_fields[field]
    if info.default_factory is not None:
        made = info.default_factory()  # type: ignore[call-arg]
        return f"`~/.cache/dormouse{str(made).partition('dormouse')[2]}`"
    if info.default is False:
        return "off"
    return "" if info.default in ((), None) else f"`{info.default}`"


def named_keys() -> frozenset[str]:
    """What a TOML file may say."""
    return frozenset(FLAGGED)


# --- metrics --------------------------------------------------------------------------------


def families(exposed: str) -> list[Metric]:
    """Of a scrape, by name."""
    return sorted(text_string_to_metric_families(exposed), key=lambda family: (OWN not in family.name, family.name))


def metric_tables(exposed: str) -> dict[str, str]:
    """What a scrape holds: every metric, the values of its labels, the bounds of its histograms."""
    found = families(exposed)
    rows = [(f"`{name_of(each)}`", each.type, _labels(each), each.documentation) for each in found]
    values = [
        (f"`{name_of(each)}`", f"`{label}`", ", ".join(f"`{value}`" for value in _values(each, label)))
        for each in found
        for label in label_names(each)
        if label not in FREE_LABELS.get(each.name, ())
    ]
    bounds = [(f"`{each.name}`", ", ".join(_values(each, "le"))) for each in found if each.type == "histogram"]
    return {
        "metrics": _table(("metric", "type", "labels", ""), rows),
        "labels": _table(("metric", "label", "values"), values),
        "buckets": _table(("histogram", "upper bounds"), bounds),
    }


def name_of(family: Metric) -> str:
    """As it is asked for: counters with `_total`, histograms without what their series end in."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def label_names(family: Metric) -> list[str]:
    """In the order of the exposition, without a histogram's bounds."""
    return [name for name in dict.fromkeys(name for each in family.samples for name in each.labels) if name != "le"]


def _labels(family: Metric) -> str:
    return ", ".join(f"`{name}`" for name in label_names(family))


def _values(family: Metric, label: str) -> Iterator[str]:
    return iter(dict.fromkeys(each.labels[label] for each in family.samples if label in each.labels))


# --- both -----------------------------------------------------------------------------------


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
