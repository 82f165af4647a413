"""Traces of when requests came and how long they were (bench/traces/README.md), scaled to what a machine can do."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from bench.errors import BenchFailed

FOLDER = Path(__file__).parent / "traces"
LEAST_TOKENS = 8
"""Of what is new in a prompt, and of an answer, after scaling: some of them must have visible text."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `at` is in seconds since the first one, lengths are in tokens."""

    session: int
    at: float
    new: int
    out: int
    keep: int | None = None
    group: int = 0
    common: int = 0


def names() -> list[str]:
    """Of the traces that are shipped."""
    return sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.jsonl.gz"))


def read(name: str) -> list[Request]:
    """The trace shipped under `name`, or the file of that name, in order of time.

    Raises:
        BenchFailed: there is none, or it is none.
    """
    path = FOLDER / f"{name}.jsonl.gz" if name in names() else Path(name)
    try:
        with gzip.open(path, "rt") as lines:
            found = [Request(**json.loads(line)) for line in lines]
    except FileNotFoundError as exc:
        raise BenchFailed(f"no trace {name!r}: there are {', '.join(names())}, or name a file") from exc
    except (OSError, ValueError, TypeError) as exc:
        raise BenchFailed(f"{path} is no trace: {exc}") from exc
    if not found:
        raise BenchFailed(f"{path} is empty")
    return sorted(found, key=lambda request: request.at)


def shortened(trace: list[Request], scale: float, max_context: int, max_output: int) -> list[Request]:
    """Lengths times `scale`; a session ends before the request with which its context would pass `max_context`."""
    contexts: Counter[int] = Counter()
    ended: set[int] = set()
    kept = []
    for request in trace:
        if request.session in ended:
            continue
        short = replace(
            request,
            new=max(LEAST_TOKENS, round(request.new * scale)),
            out=min(max_output, max(LEAST_TOKENS, round(request.out * scale))),
            keep=None if request.keep is None else round(request.keep * scale),
            common=round(request.common * scale),
        )
        before = contexts[short.session] if short.keep is None else min(short.keep, contexts[short.session])
        context = before + short.common + short.new + short.out
        if context > max_context:
            ended.add(short.session)
            continue
        contexts[short.session] = context
        kept.append(short)
    return kept


def thinned(trace: list[Request], num_requests: int, seed: int) -> list[Request]:
    """Whole sessions drawn until they have `num_requests`; the last one is cut. All where there are no more."""
    sessions: dict[int, list[Request]] = {}
    for request in trace:
        sessions.setdefault(request.session, []).append(request)
    order = list(sessions)
    random.Random(seed).shuffle(order)
    drawn: list[Request] = []
    for session in order:
        if len(drawn) >= num_requests:
            break
        drawn += sessions[session][: num_requests - len(drawn)]
    return sorted(drawn, key=lambda request: request.at)


def paced(trace: list[Request], requests_per_second: float) -> tuple[list[Request], float]:
    """Times such that so many come in a second on average, and by what they were multiplied."""
    first, last = trace[0].at, trace[-1].at
    factor = (len(trace) - 1) / requests_per_second / (last - first) if last > first else 1.0
    return [replace(request, at=(request.at - first) * factor) for request in trace], factor
