"""Commands about this machine and what the server does inside: machine, steps, gateway, nvme."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import options
from bench.options import Calibrate, Json, Model, Plots, Repeats, Seed, StreamPrompt, Threads


def register(cli: typer.Typer) -> None:
    """Add them to `cli`."""
    for command in (machine, steps, gateway, nvme):
        cli.command()(command)


def machine(json_file: Json = None) -> None:
    """Memory copy, bf16 matmul, threads: what the hardware does by itself."""
    options.finish(options.begin("machine", calibrate=True), json_file)


def steps(
    attention: options.Attention = "auto",
    streams: Annotated[int, typer.Option(min=1, help="Turns computed together.")] = 16,
    prompt_tokens: StreamPrompt = 200,
    tokens: options.Tokens = 64,
    pairs: Annotated[int, typer.Option(min=1, help="Windows with HTTP, and as many without.")] = 8,
    model: Model = None,
    threads: Threads = None,
    hbm_bytes: Annotated[str | None, typer.Option(metavar="auto|SIZE", help="As for dormouse serve.")] = None,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """What serving over HTTP costs the engine's steps; other settings come from environment and file as for serve."""
    from app.configuration import load
    from bench import report as reports
    from bench import steps as stepping
    from bench.progress import progress

    plan = stepping.StepPlan(streams, prompt_tokens, tokens, pairs, options.seed_of(seed))
    given = {"model": model, "threads": threads, "hbm_bytes": hbm_bytes}
    flags = {name: value for name, value in given.items() if value is not None}
    report = options.begin("steps", calibrate)
    for mode in options.names(attention):
        settings = load({**flags, "attention": mode}).settings
        with progress(mode, pairs) as done:
            samples = stepping.run(settings, plan, done)
        title = f"{samples.model}, attention {mode}"
        report.add(reports.steps_part(samples, {"attention": mode}), reports.steps_table(title, samples))
    options.finish(report, json_file)


def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Read at once.")] = 256,
    events_per_second: Annotated[int, typer.Option(min=1, help="Over all streams: a token each.")] = 3000,
    tokens: Annotated[int, typer.Option(min=2, help="Of every answer.")] = 128,
    repeats: Repeats = 5,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Write cProfile's figures of the loop.")] = None,
    calibrate: Calibrate = False,
    json_file: Json = None,
    plots: Plots = None,
) -> None:
    """The gateway alone: CPU of an SSE event and lag of the event loop, with a stand-in for the engine."""
    from bench import gateway_report as shown
    from bench import gateway_run as running
    from bench.progress import progress

    plan = running.GatewayPlan(streams, events_per_second, tokens, repeats)
    report = options.begin("gateway", calibrate, plots)
    with progress("gateway", plan.repeats) as done:
        samples = running.run(plan, done, profile)
    report.add(shown.part(samples), shown.table(samples))
    options.finish(report, json_file, plots)


def nvme(
    path: Annotated[Path, typer.Option(metavar="DIR", help="On the disk to measure; nothing stays there.")] = Path(),
    blocks: Annotated[int, typer.Option(min=1, help="Of the embedded model, 32 tokens each.")] = 128,
    io_threads: Annotated[int, typer.Option(min=1, help="That read and write.")] = 4,
    repeats: Repeats = 5,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """Blocks to files and back, direct and through the page cache, beside fio where it is installed."""
    from bench import nvme as disk
    from bench.progress import progress

    plan = disk.NvmePlan(blocks=blocks, threads=io_threads, rounds=repeats)
    report = options.begin("nvme", calibrate)
    with progress("nvme", plan.num_rounds) as done:
        samples = disk.measure(plan, path.resolve(), done)
    report.add(disk.part(samples), disk.table(samples))
    options.finish(report, json_file)
