"""Commands about other servers: convert, peers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench import options
from bench.options import Calibrate, Json, Seed

if TYPE_CHECKING:
    from bench.peers.against import AgainstSamples

GIB = 1024**3


def register(cli: typer.Typer) -> None:
    """Add them to `cli`."""
    cli.command()(convert)
    epilog = "Any other flag is given to `dormouse serve`, after this command's own."
    cli.command(context_settings=options.FOR_SERVE, epilog=epilog)(peers)


def convert(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
) -> None:
    """The embedded model in the files that other servers read: safetensors and a bf16 GGUF."""
    from rich.console import Console

    from app.configuration import load
    from bench.convert_weights import convert as converted

    console = Console(stderr=True)
    found = converted(load({}).settings.cache_dir, directory, lambda line: console.print(line, highlight=False))
    print(found.folder, found.gguf, sep="\n")


def peers(
    context: typer.Context,
    weights: Annotated[Path, typer.Option(metavar="DIR", help="Written by `bench convert`.")],
    llama_server: Annotated[str | None, typer.Option(metavar="PROGRAM", help="Compare with this llama-server.")] = None,
    vllm: Annotated[str | None, typer.Option(metavar="PROGRAM", help="Compare with this vllm.")] = None,
    transformers: Annotated[str | None, typer.Option(metavar="PROGRAM", help="Compare with this transformers.")] = None,
    attention: options.Attention = "exact,fast",
    lines: Annotated[
        str, typer.Option(metavar="GROUP,...", help="chat (decode, prefill, next turn), streams, restart, sessions.")
    ] = "chat,streams,restart,sessions",
    repeats: options.Repeats = 5,
    session_repeats: Annotated[int, typer.Option(min=1, help="Of the line of 256 sessions.")] = 3,
    sessions: Annotated[int, typer.Option(min=2, help="In that line.")] = 256,
    memory_gib: Annotated[int, typer.Option(min=1, help="In that line, for K/V: four times as much is asked for.")] = 2,
    place: Annotated[Path | None, typer.Option(metavar="DIR", help="For our temporary NVMe directory.")] = None,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """Us and the peers, alternating on this machine with the same weights, against the project's bars.

    How to install each peer is in bench/peers.md. With --json FILE what there is so far is kept after every round in
    FILE.part.
    """
    from bench.errors import BenchFailed
    from bench.peers import against, recipes, tables
    from bench.progress import progress

    programs = {"llama-server": llama_server, "vllm": vllm, "transformers": transformers}
    chosen = recipes.ours(options.names(attention), context.args)
    chosen += [recipes.Recipe(kind, kind, program, weights) for kind, program in programs.items() if program]
    if len(chosen) == len(options.names(attention)):
        raise BenchFailed("name a peer: --llama-server PROGRAM, --vllm PROGRAM or --transformers PROGRAM")
    plan = against.AgainstPlan(
        groups=tuple(options.names(lines)),
        repeats=repeats,
        session_repeats=session_repeats,
        sessions=sessions,
        memory_bytes=memory_gib * GIB,
        seed=options.seed_of(seed),
    )
    report = options.begin("peers", calibrate)

    def keep(samples: AgainstSamples) -> None:
        if json_file is not None and str(json_file) != "-":
            part = json_file.with_suffix(".part")
            part.write_text(json.dumps(tables.part(samples, chosen), indent=2))

    with progress("peers", plan.num_rounds * len(chosen)) as done:
        samples = against.Against(chosen, plan, place, done, keep).run()
    for result in tables.part(samples, chosen):
        report.add(result)
    report.tables.append(tables.table(samples, chosen))
    options.finish(report, json_file)
    if json_file is not None and str(json_file) != "-":
        part = json_file.with_suffix(".part")
        if part.exists():
            os.remove(part)
