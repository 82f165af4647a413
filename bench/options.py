"""Flags that several commands have, what becomes of them, and how each command begins and ends.

Nothing heavy is imported here: `dormouse --help` reads this.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bench.report import Report

Url = Annotated[str, typer.Option(metavar="URL", help="Base URL of the server, with or without /v1.")]
ServedModel = Annotated[str | None, typer.Option("--model", metavar="NAME", help="By default the first it lists.")]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="Sent as a bearer token.")]
Contexts = Annotated[str, typer.Option(metavar="TOKENS,...", help="Lengths of the prompts of single conversations.")]
Streams = Annotated[str, typer.Option(metavar="N,...", help="Numbers of parallel streams.")]
Repeats = Annotated[int, typer.Option(min=1, help="Samples of every figure.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of every answer.")]
StreamPrompt = Annotated[int, typer.Option(min=1, help="Tokens of the prompts of parallel streams.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Of the prompts; a new one by default, since a running server may still know the last ones."),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every sample there; - is stdout.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Draw PNGs there; needs matplotlib.")]
Calibrate = Annotated[bool, typer.Option(help="Measure the machine by itself first.")]
Model = Annotated[str | None, typer.Option(metavar="NAME|PATH", help="As for dormouse serve.")]
Threads = Annotated[str | None, typer.Option(metavar="auto|N", help="As for dormouse serve.")]
Attention = Annotated[str, typer.Option(metavar="exact|fast|auto,...", help="Served one after the other.")]

FOR_SERVE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that hand what they do not know to `dormouse serve`."""


def counts(text: str, flag: str) -> tuple[int, ...]:
    """Positive numbers from `140,2000`; none from an empty text."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} should be numbers with commas between them", param_hint=flag) from exc
    if any(count < 1 for count in found):
        raise typer.BadParameter("counts begin at 1", param_hint=flag)
    return found


def names(text: str) -> list[str]:
    """`exact,fast` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def seed_of(seed: int | None) -> int:
    """The one given, or a new one."""
    return secrets.randbits(32) if seed is None else seed


def begin(command: str, calibrate: bool, plots: Path | None = None) -> Report:
    """A report with nothing in it yet.

    Raises:
        BenchFailed: plots are wanted and nothing here can draw them; said now and not after an hour.
    """
    from bench import machine as machines
    from bench.report import Report

    if plots is not None:
        from bench.plots import find_matplotlib

        find_matplotlib()
    # The load is read first: calibration is a load, too.
    report = Report(command, None, machines.is_busy())
    report.machine = machines.calibrate() if calibrate else None
    return report


def finish(report: Report, json_file: Path | None, plots: Path | None = None) -> None:
    """Show, write and draw it."""
    from rich.console import Console

    if json_file is None or str(json_file) != "-":
        report.show(Console())
    if json_file is not None:
        report.write(json_file)
    if plots is not None:
        from bench.plots import draw

        for path in draw(report.as_json(), plots):
            Console(stderr=True).print(f"drew {path}", highlight=False)
