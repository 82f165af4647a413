"""Commands that ask a server over HTTP: chat, serve-and-chat, sessions, replay, tenants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench import options
from bench.options import (
    ApiKey,
    Attention,
    Calibrate,
    Contexts,
    Json,
    Plots,
    Repeats,
    Seed,
    ServedModel,
    StreamPrompt,
    Streams,
    Tokens,
    Url,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.chat import ChatPlan, ChatSamples

THE_REST_IS_FOR_SERVE = "Any other flag is given to `dormouse serve`, after this command's own: --hbm-bytes 2GiB."


def register(cli: typer.Typer) -> None:
    """Add them to `cli`."""
    cli.command()(chat)
    cli.command("serve-and-chat", context_settings=options.FOR_SERVE, epilog=THE_REST_IS_FOR_SERVE)(serve_and_chat)
    cli.command(context_settings=options.FOR_SERVE, epilog=THE_REST_IS_FOR_SERVE)(sessions)
    cli.command()(replay)
    cli.command(context_settings=options.FOR_SERVE, epilog=THE_REST_IS_FOR_SERVE)(tenants)


def chat(
    url: Url,
    model: ServedModel = None,
    api_key: ApiKey = None,
    contexts: Contexts = "140,2000,5500",
    streams: Streams = "4,8,16",
    repeats: Repeats = 5,
    tokens: Tokens = 64,
    stream_prompt_tokens: StreamPrompt = 200,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
    plots: Plots = None,
) -> None:
    """Decode, prefill, next turns and parallel streams of any OpenAI-compatible server."""
    from bench import report as reports

    plan = _chat_plan(contexts, streams, repeats, tokens, stream_prompt_tokens, seed)
    report = options.begin("chat", calibrate, plots)
    samples = _run_chat(url, model, api_key, plan, "chat")
    report.add(reports.chat_part(samples, {"url": url}), reports.chat_tables(samples.model, samples))
    options.finish(report, json_file, plots)


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
    plots: Plots = None,
) -> None:
    """Start `dormouse serve` on a free port, run `chat` against it, and stop it."""
    from bench import report as reports
    from bench.server import serving

    plan = _chat_plan(contexts, streams, repeats, tokens, stream_prompt_tokens, seed)
    report = options.begin("serve-and-chat", calibrate, plots)
    for mode in options.names(attention):
        flags = ["--attention", mode, *context.args]
        with serving(flags) as server:
            samples = _run_chat(server.url, None, None, plan, mode)
        extras = {"attention": mode, "flags": flags, "ready_seconds": server.ready_seconds}
        title = f"{samples.model}, attention {mode}, ready after {server.ready_seconds:.1f} s"
        report.add(reports.chat_part(samples, extras), reports.chat_tables(title, samples))
    options.finish(report, json_file, plots)


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
    later_words: Annotated[int | None, typer.Option(min=0, help="That later turns bring. [0]")] = None,
    think_seconds: Annotated[
        float, typer.Option(min=0, help="Mean from an answer to the next question of a session; exponential.")
    ] = 0.0,
    hbm_for: Annotated[int | None, typer.Option(min=1, help="Whole sessions that HBM holds. [60]")] = None,
    dram_for: Annotated[int | None, typer.Option(min=0, help="Whole sessions that DRAM holds. [200]")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Then the same with DRAM and NVMe off.")] = False,
    max_seconds: Annotated[float | None, typer.Option(min=1, help="Of each run; then no turn is begun.")] = None,
    nvme_place: Annotated[Path | None, typer.Option(metavar="DIR", help="For the temporary NVMe directory.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind, with other texts.")] = 1,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
    plots: Plots = None,
) -> None:
    """Many conversations over HTTP in random order: does each find its history? What does its first token wait for?

    Without --url a server of our own is started for each run. The full size computes 650,000 tokens (the baseline 1.7
    million) and takes 16 GB of disk; the time that this machine is likely to need is printed first.
    """
    from rich.console import Console

    from bench import report as reports
    from bench import sessions as many
    from bench import sessions_report as shown
    from bench import sessions_run as running

    if url is not None and (baseline or context.args or hbm_for is not None or dram_for is not None):
        raise typer.BadParameter("a server that runs already keeps its flags and budgets", param_hint="--url")
    given = {
        **{"sessions": num, "turns": turns, "in_flight": in_flight, "prompt_tokens": prompt_tokens, "tokens": tokens},
        **{"later_words": later_words, "hbm_for": hbm_for, "dram_for": dram_for},
    }
    first_seed = options.seed_of(seed)
    report = options.begin("sessions", calibrate, plots)

    def tell(line: str) -> None:
        Console(stderr=True).print(line, highlight=False)

    for number in range(repeats):
        plan = many.plan(
            given,
            seed=first_seed + 2 * number,
            max_seconds=max_seconds,
            is_quick=quick,
            think_seconds=think_seconds,
        )
        if url is not None:
            runs = running.against(url, model, api_key, plan, tell)
        else:
            runs = running.served(plan, context.args, nvme_place, tell, with_baseline=baseline)
        for samples in runs:
            report.add(shown.part(samples), shown.table(samples), reports.loads_line(*samples.load_averages))
    options.finish(report, json_file, plots)


def replay(
    url: Url,
    trace: Annotated[str, typer.Option(metavar="NAME|FILE", help="conversation, agentic, or a file of that form.")] = (
        "conversation"
    ),
    model: ServedModel = None,
    api_key: ApiKey = None,
    requests: Annotated[int, typer.Option(min=2, help="Of whole sessions, drawn from the trace.")] = 120,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second; the trace's time is scaled to it.")] = 1.0,
    length_scale: Annotated[float, typer.Option(min=0.0001, help="What the trace's lengths are multiplied by.")] = 0.05,
    max_context: Annotated[int, typer.Option(min=64, help="Tokens at which a session is cut off.")] = 6000,
    max_output: Annotated[int, typer.Option(min=8, help="Tokens of an answer, at most.")] = 64,
    repeats: Repeats = 3,
    seed: Seed = None,
    calibrate: Calibrate = True,
    json_file: Json = None,
    plots: Plots = None,
) -> None:
    """A trace of real traffic, each request at its own time; latencies count from when it should have arrived."""
    from bench import replay_report as shown
    from bench import replay_run as running
    from bench.replay import ReplayPlan

    sizes = (length_scale, max_context, max_output)
    plan = ReplayPlan(trace, requests, rate, *sizes, repeats, options.seed_of(seed))
    report = options.begin("replay", calibrate, plots)
    samples = running.run(url, model, api_key, plan)
    report.add(shown.part(samples), shown.table(samples))
    options.finish(report, json_file, plots)


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
    from bench import machine as machines
    from bench import report as reports
    from bench import tenants as flooding
    from bench.progress import progress

    plan = flooding.TenantsPlan(
        turns=turns, words=words, clients=clients, flood_words=flood_words, seed=options.seed_of(seed)
    )
    report = options.begin("tenants", calibrate)
    loads = machines.load_average()
    with progress("tenants", plan.num_rounds) as done:
        samples = flooding.run(plan, context.args, done)
    report.add(flooding.part(samples), flooding.table(samples), reports.loads_line(loads, machines.load_average()))
    options.finish(report, json_file)


def _chat_plan(
    contexts: str, streams: str, repeats: int, tokens: int, stream_prompt_tokens: int, seed: int | None
) -> ChatPlan:
    from bench.chat import ChatPlan

    return ChatPlan(
        contexts=options.counts(contexts, "--contexts"),
        streams=options.counts(streams, "--streams"),
        repeats=repeats,
        tokens=tokens,
        stream_prompt_tokens=stream_prompt_tokens,
        seed=options.seed_of(seed),
    )


def _run_chat(url: str, model: str | None, api_key: str | None, plan: ChatPlan, title: str) -> ChatSamples:
    from bench.chat import ChatBench
    from bench.client import ChatServer, connect, first_model
    from bench.progress import progress

    async def measure(done: Callable[[str], None]) -> ChatSamples:
        async with connect(url, api_key) as http:
            server = ChatServer(http, model or await first_model(http))
            return await ChatBench(server, plan, done).run()

    with progress(title, plan.num_rounds) as done:
        return asyncio.run(measure(done))
