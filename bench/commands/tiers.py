"""`bench tiers`: what sleeping sessions cost and save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench import options
from bench.options import Calibrate, Json, Model, Plots, Seed, Threads

if TYPE_CHECKING:
    from bench.report import Report


def register(cli: typer.Typer) -> None:
    """Add it to `cli`."""
    cli.command(epilog="None chosen is all. A size goes to the one measurement chosen that has it.")(tiers)


def tiers(
    wake: Annotated[bool, typer.Option("--wake", help="DRAM to HBM, against computing again.")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="DRAM and NVMe to HBM, against length.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Steps while other sessions are copied.")] = False,
    rss: Annotated[bool, typer.Option("--rss", help="Resident memory over cycles of sleep and wake.")] = False,
    long: Annotated[bool, typer.Option("--long", help="Long sessions, NVMe for all: half a million tokens.")] = False,
    many: Annotated[bool, typer.Option("--many", help="Random turns of many sessions, several at once.")] = False,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="--restore alone, of a Dormouse that runs, over HTTP.")
    ] = None,
    api_key: options.ApiKey = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="TOKENS,...", help="--restore: of prefixes. [256,512,1024,2048,4096]")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="--wake [50]; --restore: of each length [5].")] = None,
    decode_tokens: Annotated[int | None, typer.Option(min=2, help="--decode: tokens in all. [2000]")] = None,
    window_tokens: Annotated[int | None, typer.Option(min=2, help="--decode: tokens of a window. [100]")] = None,
    sleeps_per_second: Annotated[int | None, typer.Option(min=1, help="--decode: at most; else as many as go.")] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="--rss: cycles of sleep and wake. [2000]")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="--long [120], --many [96].")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="--wake [4096], --long [4096], --many [600].")] = None,
    hbm_sessions: Annotated[int | None, typer.Option(min=1, help="That HBM holds: --long [8], --many [12].")] = None,
    dram_sessions: Annotated[
        int | None, typer.Option(min=0, help="--long: that DRAM holds [30]; where it holds all, NVMe is off.")
    ] = None,
    turns: Annotated[int | None, typer.Option(min=2, help="--many: of each session. [3]")] = None,
    in_flight: Annotated[int | None, typer.Option(min=1, help="--many: turns at once. [16]")] = None,
    nvme_place: Annotated[Path | None, typer.Option(metavar="DIR", help="For the temporary NVMe directory.")] = None,
    attention: Annotated[str, typer.Option(metavar="exact|fast|auto", help="As for dormouse serve.")] = "auto",
    model: Model = None,
    threads: Threads = None,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
    plots: Plots = None,
) -> None:
    """What sleeping sessions cost and save: store and engine in this process, the server's settings, no HTTP.

    With --url a server that runs is asked instead how long it takes to restore prefixes.
    """
    sizes = {
        **{"rounds": rounds, "decode_tokens": decode_tokens, "window_tokens": window_tokens},
        **{"sleeps_per_second": sleeps_per_second, "cycles": cycles},
        **{"sessions": sessions, "tokens": tokens, "hbm_sessions": hbm_sessions, "dram_sessions": dram_sessions},
        **{"turns": turns, "in_flight": in_flight},
        "lengths": None if lengths is None else options.counts(lengths, "--lengths"),
    }
    asked = {"wake": wake, "restore": restore, "decode": decode, "rss": rss, "long": long, "many": many}
    chosen = [name for name in asked if asked[name]]
    if url is not None and chosen not in ([], ["restore"]):
        raise typer.BadParameter("over HTTP only --restore can be measured", param_hint="--url")
    report = options.begin("tiers", calibrate, plots)
    if url is None:
        given = {"model": model, "threads": threads, "attention": attention}
        _in_process(report, chosen, sizes, given, options.seed_of(seed), nvme_place)
    else:
        _over_http(report, url, model, api_key, sizes, options.seed_of(seed), nvme_place)
    options.finish(report, json_file, plots)


def _in_process(
    report: Report,
    chosen: list[str],
    sizes: dict[str, int | tuple[int, ...] | None],
    given: dict[str, str | None],
    seed: int,
    place: Path | None,
) -> None:
    from rich.text import Text

    from app.configuration import load
    from bench import machine as machines
    from bench import report as reports
    from bench.progress import progress
    from bench.tiers import choice, rig, tables

    plans = choice.plans(chosen, sizes, seed)
    settings = load({name: value for name, value in given.items() if value is not None}).settings
    loaded = rig.load(settings)
    report.tables.append(Text(f"{loaded.loaded.name}, in this process, no HTTP; {loaded.attention}"))
    extras = {"model": loaded.loaded.name, "attention": loaded.attention, "block_tokens": loaded.layout.block_tokens}
    for name, plan in plans.items():
        loads = machines.load_average()
        with progress(name, plan.num_rounds) as done:
            samples = choice.run(loaded, plan, done, place)
        load_averages = {"before": loads, "after": machines.load_average()}
        part = {"measurement": name, **extras, "load_average": load_averages, **tables.part(samples)}
        report.add(part, tables.table(samples), reports.loads_line(**load_averages))


def _over_http(
    report: Report,
    url: str,
    model: str | None,
    api_key: str | None,
    sizes: dict[str, int | tuple[int, ...] | None],
    seed: int,
    place: Path | None,
) -> None:
    from bench.progress import progress
    from bench.tiers import choice, over_http, tables
    from bench.tiers.restore import RestorePlan

    plan = choice.plans(["restore"], sizes, seed)["restore"]
    assert isinstance(plan, RestorePlan)
    with progress("restore", plan.num_rounds) as done:
        samples = over_http.run(url, model, api_key, plan, done, place)
    report.add({"measurement": "restore", "url": url, **tables.part(samples)}, tables.table(samples))
