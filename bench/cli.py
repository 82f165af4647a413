"""Figures of a machine and a server.

Nothing but tables goes to stdout, nothing but JSON with `--json -`; progress is on stderr.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bench import machine as machines
from bench import report as reports
from bench.chat import ChatBench, ChatPlan, ChatSamples
from bench.client import ChatServer, connect, first_model
from bench.errors import BenchFailed
from bench.progress import progress
from bench.report import Report
from bench.server import serving

if TYPE_CHECKING:
    from collections.abc import Callable

cli = typer.Typer(
    name="bench",
    help="Figures of this machine and of a server on it, measured from outside wherever that can be done.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
Calibrate = Annotated[bool, typer.Option(help="Measure the machine by itself first.")]
Model = Annotated[str | None, typer.Option(metavar="NAME|PATH", help="As for dormouse serve.")]
Threads = Annotated[str | None, typer.Option(metavar="auto|N", help="As for dormouse serve.")]
Attention = Annotated[str, typer.Option(metavar="exact|fast|auto,...", help="Served one after the other.")]


def run() -> None:
    """Entry point: what a person can mend is said in a line or two."""
    from app.configuration import SettingsRefused
    from kvstore.errors import SettingInvalid
    from models.errors import ModelError

    try:
        cli()
    except (BenchFailed, SettingsRefused, SettingInvalid, ModelError) as exc:
        print(f"bench: {exc}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


@cli.command()
def machine(json_file: Json = None) -> None:
    """Memory copy, bf16 matmul, threads: what the hardware does by itself."""
    _finish(_begin("machine", calibrate=True), json_file)


@cli.command()
def chat(
    url: Annotated[str, typer.Option(metavar="URL", help="Base URL of the server, with or without /v1.")],
    model: Annotated[str | None, typer.Option(metavar="NAME", help="By default the first that it lists.")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Sent as a bearer token.")] = None,
    contexts: Contexts = "140,2000,5500",
    streams: Streams = "4,8,16",
    repeats: Repeats = 5,
    tokens: Tokens = 64,
    stream_prompt_tokens: StreamPrompt = 200,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """Decode, prefill, next turns and parallel streams of any OpenAI-compatible server."""
    plan = _chat_plan(contexts, streams, repeats, tokens, stream_prompt_tokens, seed)
    report = _begin("chat", calibrate)
    samples = _run_chat(url, model, api_key, plan, "chat")
    report.add(reports.chat_part(samples, {"url": url}), reports.chat_tables(samples.model, samples))
    _finish(report, json_file)


@cli.command(
    "serve-and-chat",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other flag is given to `dormouse serve`: --hbm-bytes 2GiB --threads 2.",
)
def serve_and_chat(
    context: typer.Context,
    attention: Attention = "auto",
    contexts: Contexts = "140,2000,5500",
    streams: Streams = "4,8,16",
    repeats: Repeats = 5,
    tokens: Tokens = 64,
    stream_prompt_tokens: StreamPrompt = 200,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """Start `dormouse serve` on a free port, run `chat` against it, and stop it."""
    plan = _chat_plan(contexts, streams, repeats, tokens, stream_prompt_tokens, seed)
    report = _begin("serve-and-chat", calibrate)
    for mode in _modes(attention):
        flags = ["--attention", mode, *context.args]
        with serving(flags) as server:
            samples = _run_chat(server.url, None, None, plan, mode)
        extras = {"attention": mode, "flags": flags, "ready_seconds": server.ready_seconds}
        title = f"{samples.model}, attention {mode}, ready after {server.ready_seconds:.1f} s"
        report.add(reports.chat_part(samples, extras), reports.chat_tables(title, samples))
    _finish(report, json_file)


@cli.command()
def steps(
    attention: Attention = "auto",
    streams: Annotated[int, typer.Option(min=1, help="Turns computed together.")] = 16,
    prompt_tokens: StreamPrompt = 200,
    tokens: Tokens = 64,
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
    from bench import steps as stepping

    plan = stepping.StepPlan(streams, prompt_tokens, tokens, pairs, _seed(seed))
    given = {"model": model, "threads": threads, "hbm_bytes": hbm_bytes}
    flags = {name: value for name, value in given.items() if value is not None}
    report = _begin("steps", calibrate)
    for mode in _modes(attention):
        settings = load({**flags, "attention": mode}).settings
        with progress(mode, pairs) as done:
            samples = stepping.run(settings, plan, done)
        title = f"{samples.model}, attention {mode}"
        report.add(reports.steps_part(samples, {"attention": mode}), reports.steps_table(title, samples))
    _finish(report, json_file)


@cli.command(epilog="None chosen is all. A size goes to the one measurement chosen that has it.")
def tiers(
    wake: Annotated[bool, typer.Option("--wake", help="DRAM to HBM, against computing again.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Steps while other sessions are copied.")] = False,
    rss: Annotated[bool, typer.Option("--rss", help="Resident memory over cycles of sleep and wake.")] = False,
    long: Annotated[bool, typer.Option("--long", help="Long sessions, DRAM for all: half a million tokens.")] = False,
    many: Annotated[bool, typer.Option("--many", help="Random turns of many sessions, several at once.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="--wake: wakes. [50]")] = None,
    decode_tokens: Annotated[int | None, typer.Option(min=2, help="--decode: tokens in all. [2000]")] = None,
    window_tokens: Annotated[int | None, typer.Option(min=2, help="--decode: tokens of a window. [100]")] = None,
    sleeps_per_second: Annotated[int | None, typer.Option(min=1, help="--decode: at most; else as many as go.")] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="--rss: cycles of sleep and wake. [2000]")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="--long [120], --many [96].")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="--wake [4096], --long [4096], --many [600].")] = None,
    hbm_sessions: Annotated[int | None, typer.Option(min=1, help="That HBM holds: --long [8], --many [12].")] = None,
    turns: Annotated[int | None, typer.Option(min=2, help="--many: of each session. [3]")] = None,
    in_flight: Annotated[int | None, typer.Option(min=1, help="--many: turns at once. [16]")] = None,
    attention: Annotated[str, typer.Option(metavar="exact|fast|auto", help="As for dormouse serve.")] = "auto",
    model: Model = None,
    threads: Threads = None,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """What sleeping sessions cost and save: store and engine in this process, the server's settings, no HTTP."""
    from app.configuration import load
    from bench.tiers import choice, rig, tables

    asked = {"wake": wake, "decode": decode, "rss": rss, "long": long, "many": many}
    sizes = {
        **{"rounds": rounds, "decode_tokens": decode_tokens, "window_tokens": window_tokens},
        **{"sleeps_per_second": sleeps_per_second, "cycles": cycles},
        **{"sessions": sessions, "tokens": tokens, "hbm_sessions": hbm_sessions},
        **{"turns": turns, "in_flight": in_flight},
    }
    plans = choice.plans([name for name in asked if asked[name]], sizes, _seed(seed))
    given = {"model": model, "threads": threads, "attention": attention}
    settings = load({name: value for name, value in given.items() if value is not None}).settings
    report = _begin("tiers", calibrate)
    loaded = rig.load(settings)
    report.tables.append(Text(f"{loaded.loaded.name}, in this process, no HTTP; {loaded.attention}"))
    extras = {"model": loaded.loaded.name, "attention": loaded.attention, "block_tokens": loaded.layout.block_tokens}
    for name, plan in plans.items():
        loads = machines.load_average()
        with progress(name, plan.num_rounds) as done:
            samples = choice.run(loaded, plan, done)
        load_averages = {"before": loads, "after": machines.load_average()}
        part = {"measurement": name, **extras, "load_average": load_averages, **tables.part(samples)}
        report.add(part, tables.table(samples), reports.loads_line(**load_averages))
    _finish(report, json_file)


@cli.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other flag is given to `dormouse serve`, after this command's own: --attention fast --nvme-bytes 0.",
)
def sessions(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(metavar="URL", help="A server that runs already, as it is.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="With --url; else its first.")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="With --url: sent as a bearer token.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="24 sessions, 8 in flight, HBM for 4, DRAM for 8.")] = False,
    num: Annotated[int | None, typer.Option("--sessions", min=1, help="Conversations. [1024]")] = None,
    turns: Annotated[int | None, typer.Option(min=2, help="Of each. [3]")] = None,
    in_flight: Annotated[int | None, typer.Option(min=1, help="Turns at once. [64]")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=40, help="Of first prompts. [500]")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of every answer. [16]")] = None,
    hbm_for: Annotated[int | None, typer.Option(min=1, help="Whole sessions that HBM holds. [60]")] = None,
    dram_for: Annotated[int | None, typer.Option(min=0, help="Whole sessions that DRAM holds. [200]")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Then the same with DRAM and NVMe off.")] = False,
    max_seconds: Annotated[float | None, typer.Option(min=1, help="Of each run; then no turn is begun.")] = None,
    nvme_place: Annotated[Path | None, typer.Option(metavar="DIR", help="For the temporary NVMe directory.")] = None,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """Many conversations over HTTP in random order: does each find its history, and what does its first token wait for?

    The full size computes 650,000 tokens (the baseline 1.7 million) and takes 16 GB of disk; the time that this machine
    is likely to need is printed first.
    """
    from bench import sessions as many
    from bench import sessions_report as shown
    from bench import sessions_run as running

    if url is not None and (baseline or context.args or hbm_for is not None or dram_for is not None):
        raise typer.BadParameter("a server that runs already keeps its flags and budgets", param_hint="--url")
    given = {
        **{"sessions": num, "turns": turns, "in_flight": in_flight, "prompt_tokens": prompt_tokens, "tokens": tokens},
        **{"hbm_for": hbm_for, "dram_for": dram_for},
    }
    plan = many.plan(given, seed=_seed(seed), max_seconds=max_seconds, is_quick=quick)
    report = _begin("sessions", calibrate)

    def tell(line: str) -> None:
        Console(stderr=True).print(line, highlight=False)

    if url is not None:
        runs = running.against(url, model, api_key, plan, tell)
    else:
        runs = running.served(plan, context.args, nvme_place, tell, with_baseline=baseline)
    for samples in runs:
        report.add(shown.part(samples), shown.table(samples), reports.loads_line(*samples.load_averages))
    _finish(report, json_file)


@cli.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other flag is given to `dormouse serve`: --hbm-bytes 2GiB --threads 2.",
)
def tenants(
    context: typer.Context,
    turns: Annotated[int, typer.Option(min=2, help="Of the key that is timed, alone and again beside the flood.")] = 40,
    words: Annotated[int, typer.Option(min=1, help="Of its prompts.")] = 250,
    clients: Annotated[int, typer.Option(min=1, help="Of the key that floods, all at once.")] = 24,
    flood_words: Annotated[int, typer.Option(min=1, help="Of their prompts.")] = 1_000,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
) -> None:
    """What one API key's flood costs another: p95 of first tokens alone and beside it."""
    from bench import tenants as flooding

    plan = flooding.TenantsPlan(turns=turns, words=words, clients=clients, flood_words=flood_words, seed=_seed(seed))
    report = _begin("tenants", calibrate)
    loads = machines.load_average()
    with progress("tenants", plan.num_rounds) as done:
        samples = flooding.run(plan, context.args, done)
    report.add(flooding.part(samples), flooding.table(samples), reports.loads_line(loads, machines.load_average()))
    _finish(report, json_file)


@cli.command()
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

    plan = disk.NvmePlan(blocks=blocks, threads=io_threads, rounds=repeats)
    report = _begin("nvme", calibrate)
    with progress("nvme", plan.num_rounds) as done:
        samples = disk.measure(plan, path.resolve(), done)
    report.add(disk.part(samples), disk.table(samples))
    _finish(report, json_file)


def _chat_plan(
    contexts: str, streams: str, repeats: int, tokens: int, stream_prompt_tokens: int, seed: int | None
) -> ChatPlan:
    return ChatPlan(
        contexts=_counts(contexts, "--contexts"),
        streams=_counts(streams, "--streams"),
        repeats=repeats,
        tokens=tokens,
        stream_prompt_tokens=stream_prompt_tokens,
        seed=_seed(seed),
    )


def _counts(text: str, flag: str) -> tuple[int, ...]:
    """Positive numbers from `140,2000`; none from an empty text."""
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} should be numbers with commas between them", param_hint=flag) from exc
    if any(count < 1 for count in counts):
        raise typer.BadParameter("counts begin at 1", param_hint=flag)
    return counts


def _modes(attention: str) -> list[str]:
    return [mode.strip() for mode in attention.split(",") if mode.strip()]


def _seed(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else seed


def _begin(command: str, calibrate: bool) -> Report:
    # The load is read first: calibration is a load, too.
    report = Report(command, None, machines.is_busy())
    report.machine = machines.calibrate() if calibrate else None
    return report


def _finish(report: Report, json_file: Path | None) -> None:
    if json_file is None or str(json_file) != "-":
        report.show(Console())
    if json_file is not None:
        report.write(json_file)


def _run_chat(url: str, model: str | None, api_key: str | None, plan: ChatPlan, title: str) -> ChatSamples:
    async def measure(done: Callable[[str], None]) -> ChatSamples:
        async with connect(url, api_key) as http:
            server = ChatServer(http, model or await first_model(http))
            return await ChatBench(server, plan, done).run()

    with progress(title, plan.num_rounds) as done:
        return asyncio.run(measure(done))
