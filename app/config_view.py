"""`dormouse config`: the settings in force and their origins, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from app.configuration import Source
from app.settings import SECRETS, Panel, Settings, panel
from app.units import format_bytes

if TYPE_CHECKING:
    from app.configuration import Configuration, Origin

Plain = str | int | float | None | list[str]


def as_json(configuration: Configuration) -> dict[str, object]:
    """`{"file", "settings": {name: {"value", "source", "name"}}}`; a secret is only said to be set."""
    settings = {
        field: {"value": plain(configuration, field), "source": origin.source.value, "name": origin.name or None}
        for field, origin in configuration.origins.items()
    }
    return {"file": str(configuration.file) if configuration.file else None, "settings": settings}


def show(configuration: Configuration, console: Console | None = None) -> None:
    console = console or Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    for heading in Panel:
        table.add_row(f"[bold]{heading.value}[/bold]")
        for field in Settings.model_fields:
            if panel(field) == heading:
                origin = configuration.origins[field]
                style = "dim" if origin.source is Source.DEFAULT else ""
                table.add_row(f"  {field}", _shown(configuration, field), _from(field, origin), style=style)
    console.print(table)
    file = configuration.file or "none (--config FILE, ./dormouse.toml or ~/.config/dormouse/dormouse.toml)"
    console.print(f"\nfile: {file}", highlight=False)


def plain(configuration: Configuration, field: str) -> Plain:
    value = getattr(configuration.settings, field)
    if field in SECRETS:
        return "set" if value is not None else None
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _shown(configuration: Configuration, field: str) -> str:
    value = plain(configuration, field)
    if field.endswith("_bytes") and isinstance(value, int):
        return f"{value} ({format_bytes(value)})"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value is None else str(value)


def _from(field: str, origin: Origin) -> str:
    return "default" if origin.source is Source.DEFAULT else origin.name
