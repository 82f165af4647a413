"""Commands about what was measured before: compare, plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Results = Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Written with --json.")]


def register(cli: typer.Typer) -> None:
    """Add them to `cli`."""
    cli.command()(compare)
    cli.command()(plot)


def compare(
    first: Results,
    second: Results,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the ratios there.")] = None,
) -> None:
    """Ratios of two runs, first over second: of medians, and how far they spread."""
    import json

    from rich.console import Console

    from bench import compare as comparing

    lines = comparing.compared(comparing.read(first), comparing.read(second))
    if json_file is None or str(json_file) != "-":
        Console().print(comparing.table(lines, first.name, second.name))
    if json_file is not None:
        text = json.dumps([comparing.as_json(line) for line in lines], indent=2)
        print(text) if str(json_file) == "-" else json_file.write_text(text + "\n")


def plot(
    results: Results,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the PNGs go.")] = Path(),
) -> None:
    """Draw PNGs of a run; needs matplotlib."""
    from rich.console import Console

    from bench import compare as comparing
    from bench.plots import draw

    for path in draw(comparing.read(results), directory):
        Console(stderr=True).print(f"drew {path}", highlight=False)
