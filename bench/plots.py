"""PNGs of a run, drawn from what --json writes. matplotlib is imported here and nowhere else.

chat        decode, prefill and time to the first token against context; output against streams
sessions    where the time to the first token goes, by the tier that a turn woke from
tiers       restore and recompute time against length, and bandwidth beside the devices' own
replay      how many requests had their first token, and their answer, after how long
gateway     the loop's lag and an event's CPU, window by window
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BenchFailed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (7.0, 4.2)
DOTS_PER_INCH = 130


def find_matplotlib() -> None:
    """Raise unless plots can be drawn.

    Raises:
        BenchFailed: matplotlib is not installed; says how to get it.
    """
    try:
        import matplotlib as mpl
    except ImportError as exc:
        raise BenchFailed(
            "plots need matplotlib, which is not installed: pip install 'dormouse-gateway[bench]', or leave --plots out"
        ) from exc
    mpl.use("agg")


def draw(run: dict[str, Any], directory: Path) -> list[Path]:
    """One PNG for each thing there is to see in `run`; the files.

    Raises:
        BenchFailed: there is no matplotlib, or nothing to see.
    """
    find_matplotlib()
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, title, axis_of in _plots(run):
        figure = _figure(title, axis_of)
        path = directory / f"{run['command']}-{name}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": "dormouse bench"})
        drawn.append(path)
    if not drawn:
        raise BenchFailed(f"there is nothing to draw of {run['command']}")
    return drawn


Drawing = Callable[["Axes"], None]


def _figure(title: str, axis_of: Drawing) -> Figure:
    # Not through pyplot: nothing is kept, and no window system is asked.
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axis_of(axes)
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    return figure


def _plots(run: dict[str, Any]) -> Iterator[tuple[str, str, Drawing]]:
    results = run["results"]
    contexts = [result for result in results if result.get("contexts")]
    if contexts:
        figures = {
            "decode": ("decode_seconds_per_token", 1e3, "ms a token"),
            "prefill": ("prefill_tokens_per_second", 1.0, "prompt tokens a second"),
            "ttft-cold": ("cold_ttft_seconds", 1.0, "seconds to the first token, cold"),
            "ttft-next": ("next_ttft_seconds", 1e3, "ms to the first token of the next turn"),
        }
        for name, (figure, factor, unit) in figures.items():
            lines = {_label(result): _against_context(result, figure, factor) for result in contexts}
            yield name, unit, _lines(lines, "tokens of context", unit)
    streams = [result for result in results if isinstance(result.get("streams"), list) and result["streams"]]
    if streams:
        lines = {_label(result): _against_streams(result) for result in streams}
        yield "streams", "output of parallel streams", _lines(lines, "streams", "output tokens a second")
    for result in results:
        yield from _plots_of(result)


def _plots_of(result: dict[str, Any]) -> Iterator[tuple[str, str, Drawing]]:
    summary = result.get("summary", {})
    if "by_tier" in summary:
        name = f"ttft-{result['title'].replace(' ', '-')}-{result['plan']['seed']}"
        yield name, f"{result['title']}: time to the first token", _stacked(summary["by_tier"])
    if "points" in summary:
        yield "restore", "a prefix resident again", _restores(summary["points"])
        yield "bandwidth", "restored bytes a second", _bandwidths(summary["points"], summary["raw_bytes_per_second"])
    if "rounds" in result and "time_scale" in result:
        yield "latency", f"{result['plan']['trace']}: since a request should have arrived", _shares(result["rounds"])
    if "lag_p99_seconds" in summary:
        yield "events", "CPU of an SSE event", _by_window(result["event_seconds"], 1e6, "us")


Line = list[tuple[float, dict[str, float], float]]
"""x, a summary, and what its numbers are multiplied by."""


def _label(result: dict[str, Any]) -> str:
    return str(result.get("line") or result.get("attention") or result.get("model") or "")


def _against_context(result: dict[str, Any], figure: str, factor: float) -> Line:
    return [(each["context"], each["summary"][figure], factor) for each in result["contexts"]]


def _against_streams(result: dict[str, Any]) -> Line:
    return [(each["streams"], each["summary"]["output_tokens_per_second"], 1.0) for each in result["streams"]]


def _lines(lines: dict[str, Line], x: str, y: str) -> Drawing:
    def draw_on(axes: Axes) -> None:
        for label, line in lines.items():
            _line(axes, line, label)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)

    return draw_on


def _line(axes: Axes, line: Line, label: str) -> None:
    """Medians, with bars from least to most."""
    xs = [x for x, _, _ in line]
    medians = [each["median"] * factor for _, each, factor in line]
    below = [(each["median"] - each["low"]) * factor for _, each, factor in line]
    above = [(each["high"] - each["median"]) * factor for _, each, factor in line]
    axes.errorbar(xs, medians, yerr=[below, above], marker="o", capsize=3, label=label)


def _stacked(by_tier: dict[str, dict[str, dict[str, float]]]) -> Drawing:
    parts = ("queue", "wake", "prefill", "other")

    def draw_on(axes: Axes) -> None:
        names = list(by_tier)
        bottoms = [0.0] * len(names)
        for part in parts:
            heights = [by_tier[name].get(f"{part}_seconds", {}).get("median", 0.0) * 1e3 for name in names]
            axes.bar(names, heights, bottom=bottoms, label=part)
            bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
        axes.set_ylabel("ms, medians of the parts")

    return draw_on


def _restores(points: list[dict[str, Any]]) -> Drawing:
    def draw_on(axes: Axes) -> None:
        names = {"recompute": "computed again", "dram": "from DRAM", "nvme": "from NVMe"}
        for name, label in names.items():
            line = [(each["tokens"], each[f"{name}_seconds"], 1e3) for each in points if f"{name}_seconds" in each]
            if line:
                _line(axes, line, label)
        axes.set_xlabel("tokens")
        axes.set_ylabel("ms")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")

    return draw_on


def _bandwidths(points: list[dict[str, Any]], raw: dict[str, dict[str, float]]) -> Drawing:
    def draw_on(axes: Axes) -> None:
        for number, (tier, label) in enumerate({"dram": "from DRAM", "nvme": "from NVMe"}.items()):
            key = f"{tier}_bytes_per_second"
            line = [(each["tokens"], each[key], 1e-9) for each in points if key in each]
            if line:
                _line(axes, line, label)
            if tier in raw:
                axes.axhline(raw[tier]["median"] / 1e9, linestyle=":", color=f"C{number}", label=f"{tier}: the device")
        axes.set_xlabel("tokens")
        axes.set_ylabel("GB/s")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)

    return draw_on


def _shares(rounds: list[dict[str, Any]]) -> Drawing:
    def draw_on(axes: Axes) -> None:
        for figure, label in {"ttft_seconds": "first token", "seconds": "whole answer"}.items():
            seconds = sorted(each[figure] for one in rounds for each in one["answered"])
            if seconds:
                axes.step(seconds, [(index + 1) / len(seconds) for index in range(len(seconds))], label=label)
        axes.set_xlabel("seconds")
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1)

    return draw_on


def _by_window(values: Sequence[float], factor: float, unit: str) -> Drawing:
    def draw_on(axes: Axes) -> None:
        axes.bar([str(index + 1) for index in range(len(values))], [value * factor for value in values])
        axes.set_xlabel("window")
        axes.set_ylabel(unit)

    return draw_on
