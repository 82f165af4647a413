"""What was measured: tables for people, JSON for programs."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.machine import load_average
from bench.stats import Summary, p95, summary
from dormouse_gateway import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from bench.chat import ChatSamples
    from bench.machine import Machine
    from bench.steps import StepSamples

STEP_TARGET = 1.15
"""p95 of a step with 16 streams over HTTP, over that of the same steps without; the project's own bar."""


@dataclass(slots=True)
class Report:
    """One run of one command. `parts` hold single samples and their summaries, ready for JSON."""

    command: str
    machine: Machine | None
    was_busy: bool
    load_before: tuple[float, ...] = field(default_factory=load_average)
    parts: list[dict[str, Any]] = field(default_factory=list)
    tables: list[RenderableType] = field(default_factory=list)

    def add(self, part: dict[str, Any], *tables: RenderableType) -> None:
        """One more result, and how it looks."""
        self.parts.append(part)
        self.tables += tables

    def show(self, console: Console) -> None:
        """Print everything for people."""
        if self.machine is not None:
            console.print(machine_table(self.machine))
        console.print(*self.tables, sep="\n")
        console.print(loads_line(self.load_before, load_average()))
        if self.was_busy:
            console.print("The machine was busy before this began: a quiet one has other figures.", style="yellow")

    def write(self, path: Path) -> None:
        """Write everything for programs; `-` is stdout."""
        text = json.dumps(self.as_json(), indent=2)
        if str(path) == "-":
            print(text)
        else:
            path.write_text(text + "\n")

    def as_json(self) -> dict[str, Any]:
        """Seconds, bytes and tokens, in plain units; every sample is there."""
        return {
            "command": self.command,
            "dormouse": __version__,
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "load_average": {"before": self.load_before, "after": load_average(), "was_busy": self.was_busy},
            "machine": None if self.machine is None else asdict(self.machine),
            "results": self.parts,
        }


def loads_line(before: tuple[float, ...], after: tuple[float, ...]) -> Text:
    """Load averages round something that was measured."""
    shown = (" ".join(f"{load:.2f}" for load in loads) for loads in (before, after))
    return Text("load average {} before, {} after".format(*shown), "dim")


def spread(values: Summary, digits: int = 1) -> str:
    """`12.3 (11.9-14.0)`: the median, then least and most."""
    if values.samples == 1:
        return f"{values.median:,.{digits}f}"
    return f"{values.median:,.{digits}f} ({values.low:,.{digits}f}-{values.high:,.{digits}f})"


def machine_table(machine: Machine) -> Table:
    """Parts and rates of the machine."""
    table = Table(show_header=False)
    gigabytes = 1e-9
    rows = {
        "CPU": f"{machine.cpu}, {machine.cores} cores; {' '.join(machine.flags)}",
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "torch": f"{machine.torch}, {machine.threads} threads, Python {machine.python}",
        "memory copy, 1 thread": f"{spread(machine.copy_bytes_per_second.scaled(gigabytes))} GB/s",
        f"memory copy, {machine.threads} threads": (
            f"{spread(machine.threaded_copy_bytes_per_second.scaled(gigabytes))} GB/s"
        ),
        "bf16 matmul": f"{spread(machine.bf16_matmul_flop_per_second.scaled(gigabytes), 0)} GFLOP/s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def chat_tables(title: str, samples: ChatSamples) -> Group:
    """Two tables and what is doubtful about them."""
    contexts = Table()
    for column in ("context", "decode ms/token", "prefill tok/s", "TTFT cold ms", "TTFT next turn ms", "reused"):
        contexts.add_column(column, justify="right")
    for each in samples.contexts:
        contexts.add_row(
            f"{summary(each.prompt_tokens).median:,.0f}",
            spread(summary(each.decode_seconds_per_token).scaled(1e3)),
            spread(summary(each.prefill_tokens_per_second), 0),
            spread(summary(each.cold_ttft_seconds).scaled(1e3), 0),
            spread(summary(each.next_ttft_seconds).scaled(1e3), 0),
            _reused(each.next_cached_tokens, each.next_prompt_tokens),
        )
    streams = Table()
    for column in ("streams", "output tok/s", "decode ms/token", "TTFT ms", "seconds"):
        streams.add_column(column, justify="right")
    for one in samples.streams:
        streams.add_row(
            str(one.streams),
            spread(summary(one.output_tokens_per_second)),
            spread(summary(one.decode_seconds_per_token).scaled(1e3)),
            spread(summary(one.ttft_seconds).scaled(1e3), 0),
            spread(summary(one.seconds), 2),
        )
    parts: list[RenderableType] = []
    if contexts.row_count:
        parts += [Text(f"{title}: one conversation, answers of {samples.plan.tokens} tokens"), contexts]
    if streams.row_count:
        prompt = samples.plan.stream_prompt_tokens
        parts += [Text(f"{title}: streams with prompts of {prompt} tokens, answers of {samples.plan.tokens}"), streams]
    return Group(*parts, *(Text(f"doubtful: {doubt}", "yellow") for doubt in samples.doubts()))


def _reused(cached: list[int | None], prompts: list[int]) -> str:
    known = [tokens for tokens in cached if tokens is not None]
    if not known:
        return "not told"
    return f"{summary(known).median:,.0f} of {summary(prompts).median:,.0f}"


def chat_part(samples: ChatSamples, extras: dict[str, Any]) -> dict[str, Any]:
    """Samples and summaries of one server."""
    return {
        **extras,
        "model": samples.model,
        "plan": asdict(samples.plan),
        "contexts": [
            {
                **asdict(each),
                "summary": {
                    "decode_seconds_per_token": asdict(summary(each.decode_seconds_per_token)),
                    "prefill_tokens_per_second": asdict(summary(each.prefill_tokens_per_second)),
                    "cold_ttft_seconds": asdict(summary(each.cold_ttft_seconds)),
                    "next_ttft_seconds": asdict(summary(each.next_ttft_seconds)),
                },
            }
            for each in samples.contexts
        ],
        "streams": [
            {
                **asdict(each),
                "summary": {
                    "output_tokens_per_second": asdict(summary(each.output_tokens_per_second)),
                    "decode_seconds_per_token": asdict(summary(each.decode_seconds_per_token)),
                    "ttft_seconds": asdict(summary(each.ttft_seconds)),
                },
            }
            for each in samples.streams
        ],
        "doubts": samples.doubts(),
    }


def steps_table(title: str, samples: StepSamples) -> Group:
    """p95 and medians of both conditions, and the ratio."""
    from bench.steps import all_seconds

    plan, ratio = samples.plan, samples.ratio()
    table = Table()
    for column in ("", "p95 ms", "median ms", "mean interval ms", "steps", "windows"):
        table.add_column(column, justify="right")
    for name, windows in (("over HTTP", samples.http), ("no HTTP", samples.plain)):
        seconds = all_seconds(windows)
        table.add_row(
            name,
            f"{p95(seconds) * 1e3:.2f}",
            f"{summary(seconds).median * 1e3:.2f}",
            spread(summary([window.mean_interval_seconds for window in windows]).scaled(1e3), 2),
            f"{len(seconds):,}",
            str(len(windows)),
        )
    line = f"p95 ratio {ratio.value:.3f}"
    if len(samples.http) > 1:
        line += f" (95% interval {ratio.low:.3f}-{ratio.high:.3f})"
    verdict = "within" if ratio.value <= STEP_TARGET else "above"
    return Group(
        Text(f"{title}: engine steps of {plan.streams} streams"), table, Text(f"{line}; {verdict} {STEP_TARGET}")
    )


def steps_part(samples: StepSamples, extras: dict[str, Any]) -> dict[str, Any]:
    """Every compared step's seconds, and the ratio."""
    from bench.steps import all_seconds

    return {
        **extras,
        **asdict(samples),
        "summary": {
            "http_p95_seconds": p95(all_seconds(samples.http)),
            "plain_p95_seconds": p95(all_seconds(samples.plain)),
            "p95_ratio": asdict(samples.ratio()),
            "target": STEP_TARGET,
        },
    }
