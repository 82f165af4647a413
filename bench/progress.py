"""How far a benchmark is, on stderr: a bar for people, now and then a line for a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 30.0
"""Between lines where stderr is no terminal."""


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show progress while the block lasts; the function given moves it on by one and says what was done."""
    console = Console(stderr=True)
    yield from _bar(console, title, total) if console.is_terminal else _lines(console, title, total)


def _bar(console: Console, title: str, total: int) -> Iterator[Callable[[str], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Drawn when something was measured and not by a thread of its own, which would take turns with what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(title, total=total)
        bar.refresh()
        yield lambda what: bar.update(task, advance=1, description=f"{title}: {what}", refresh=True)


def _lines(console: Console, title: str, total: int) -> Iterator[Callable[[str], None]]:
    started = said_at = time.monotonic()
    count = 0

    def done(what: str) -> None:
        nonlocal count, said_at
        count += 1
        now = time.monotonic()
        if now - said_at >= LINE_SECONDS:
            said_at = now
            console.print(f"{title}: {count} of {total} after {now - started:.0f} s, {what}", highlight=False)

    yield done
