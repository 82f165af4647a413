"""`bench compare` and the plots: what they make of what was written."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from bench import compare, plots
from bench.cli import cli
from bench.errors import BenchFailed

if TYPE_CHECKING:
    from pathlib import Path


def figure(*values: float) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "low": ordered[0], "high": ordered[-1], "samples": len(values)}


def chat(*, decode: float, contexts: tuple[int, ...] = (140, 2000)) -> dict[str, Any]:
    """A run of `bench chat` as --json writes it."""
    names = ("decode_seconds_per_token", "prefill_tokens_per_second", "cold_ttft_seconds", "next_ttft_seconds")
    return {
        "command": "chat",
        "results": [
            {
                "model": "counting",
                "contexts": [
                    {
                        "context": context,
                        "summary": {name: figure(decode * 0.9, decode, decode * 1.2) for name in names},
                    }
                    for context in contexts
                ],
                "streams": [{"streams": 4, "summary": {"output_tokens_per_second": figure(90, 100, 110)}}],
            }
        ],
    }


def test_figures_of_two_runs_are_met_by_what_they_are_of_and_not_by_their_order() -> None:
    lines = compare.compared(chat(decode=0.03), chat(decode=0.02, contexts=(2000, 5500)))

    by_name = {line.name: line for line in lines}
    assert not [name for name in by_name if "context 140" in name or "5500" in name]
    line = by_name["contexts context 2000 decode_seconds_per_token"]
    assert line.ratio == pytest.approx(1.5)
    assert line.low == pytest.approx(0.027 / 0.024)
    assert line.high == pytest.approx(0.036 / 0.018)
    assert by_name["streams streams 4 output_tokens_per_second"].ratio == 1.0


def test_runs_of_different_things_cannot_be_compared() -> None:
    with pytest.raises(BenchFailed, match="no figure is in both: one is of chat, the other of nvme"):
        compare.compared(chat(decode=1), {"command": "nvme", "results": []})


def test_compare_prints_ratios_and_writes_them(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(chat(decode=0.03)))
    second.write_text(json.dumps(chat(decode=0.02)))

    shown = CliRunner().invoke(cli, ["compare", str(first), str(second)], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert "1.500" in shown.stdout

    written = CliRunner().invoke(cli, ["compare", str(first), str(second), "--json", "-"])
    assert {round(line["ratio"], 3) for line in json.loads(written.stdout)} == {1.5, 1.0}


def test_a_file_that_no_benchmark_wrote_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")

    done = CliRunner().invoke(cli, ["compare", str(other), str(other)])

    assert done.exit_code == 1
    assert "was not written by a benchmark" in done.stderr


RUNS = {
    "chat": (chat(decode=0.03), {"decode", "prefill", "ttft-cold", "ttft-next", "streams"}),
    "sessions": (
        {
            "command": "sessions",
            "results": [
                {
                    "title": "as served",
                    "plan": {"seed": 7},
                    "summary": {"by_tier": {"first": {"prefill_seconds": figure(0.5), "other_seconds": figure(0.1)}}},
                }
            ],
        },
        {"ttft-as-served-7"},
    ),
    "tiers": (
        {
            "command": "tiers",
            "results": [
                {
                    "summary": {
                        "raw_bytes_per_second": {"dram": figure(6e9)},
                        "points": [
                            {
                                "tokens": 512,
                                "recompute_seconds": figure(0.5),
                                "dram_seconds": figure(0.002),
                                "dram_bytes_per_second": figure(5e9),
                            }
                        ],
                    }
                }
            ],
        },
        {"restore", "bandwidth"},
    ),
    "replay": (
        {
            "command": "replay",
            "results": [
                {
                    "plan": {"trace": "agentic"},
                    "time_scale": 0.1,
                    "summary": {},
                    "rounds": [{"answered": [{"ttft_seconds": 0.2, "seconds": 1.0}]}],
                }
            ],
        },
        {"latency"},
    ),
}


@pytest.mark.parametrize("command", RUNS)
def test_every_kind_of_run_is_drawn(command: str, tmp_path: Path) -> None:
    run, names = RUNS[command]

    drawn = plots.draw(run, tmp_path)

    assert {path.name for path in drawn} == {f"{command}-{name}.png" for name in names}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_without_matplotlib_plots_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    done = CliRunner().invoke(cli, ["chat", "--url", "http://127.0.0.1:9", "--plots", "there", "--no-calibrate"])

    assert done.exit_code == 1
    assert "pip install 'dormouse-gateway[bench]'" in done.stderr
