"""What `bench replay` found: a table for people, a part for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.replay import most_in_flight
from bench.report import spread
from bench.stats import summary

if TYPE_CHECKING:
    from bench.replay import Answered, ReplaySamples, Round

LATE_SECONDS = 0.05
"""By which this process may send a request too late before its figures are doubtful."""

FIGURES: dict[str, Callable[[Answered], float]] = {
    "TTFT": lambda each: each.ttft_seconds,
    "whole answer": lambda each: each.seconds,
    "waited for the answer before": lambda each: each.sent_seconds,
}
PERCENTILES = (50, 95, 99)


def table(samples: ReplaySamples) -> Group:
    """For people: each percentile is a median over the rounds."""
    plan = samples.plan
    rows = Table()
    rows.add_column("seconds since it should have arrived")
    for percentile in PERCENTILES:
        rows.add_column(f"p{percentile}", justify="right")
    for name, of in FIGURES.items():
        rows.add_row(name, *(spread(summary(_percentiles(samples, of, each)), 2) for each in PERCENTILES))
    title = (
        f"{samples.model}: trace {plan.trace}, {plan.requests} requests of {samples.sessions} sessions at "
        f"{plan.requests_per_second:g} a second (its time x {samples.time_scale:.3g}, its lengths x "
        f"{plan.length_scale:g}), {plan.repeats} rounds"
    )
    return Group(Text(title), rows, *(Text(line) for line in _lines(samples)))


def part(samples: ReplaySamples) -> dict[str, Any]:
    """Every request, and what they come to."""
    figures = {"ttft": "TTFT", "answer": "whole answer"}
    return {
        **asdict(samples),
        "summary": {
            **{
                f"{name}_p{percentile}_seconds": asdict(summary(_percentiles(samples, FIGURES[figure], percentile)))
                for name, figure in figures.items()
                for percentile in PERCENTILES
            },
            "reused_share": asdict(summary([_reused(each) for each in samples.rounds])),
            "failures": sum(len(each.failures) for each in samples.rounds),
            "not_sent": sum(each.not_sent for each in samples.rounds),
        },
    }


def _percentiles(samples: ReplaySamples, of: Callable[[Answered], float], percentile: int) -> list[float]:
    """One of each round in which anything was answered."""
    rounds = [each.answered for each in samples.rounds if each.answered]
    return [float(np.percentile([of(one) for one in each], percentile)) for each in rounds] or [float("nan")]


def _reused(of: Round) -> float:
    """Prompt tokens that were not computed, of all."""
    prompt = sum(each.prompt_tokens for each in of.answered)
    return sum(sum(each.turn.reused_tokens.values()) for each in of.answered) / prompt if prompt else 0.0


def _lines(samples: ReplaySamples) -> Sequence[str]:
    rounds = samples.rounds
    answered = [each for one in rounds for each in one.answered]
    failures = [failure for one in rounds for failure in one.failures]
    unsent = sum(one.not_sent for one in rounds)
    lines = [f"{len(answered):,} answered, {len(failures)} failed, {unsent} not sent after a failure", *failures[:3]]
    if answered:
        prompts, outputs = ([getattr(each, name) for each in answered] for name in ("prompt_tokens", "output_tokens"))
        share = summary([_reused(one) for one in rounds])
        lines += [
            f"prompts of {np.median(prompts):,.0f} tokens (at most {max(prompts):,}), answers of "
            f"{np.median(outputs):,.0f}; {spread(share.scaled(100))}% of prompt tokens were reused",
            f"at most {max(most_in_flight(one.answered) for one in rounds)} under way at once",
        ]
        late = max(each.late_seconds for each in answered)
        if late > LATE_SECONDS:
            lines.append(f"doubtful: this process sent a request {late * 1e3:,.0f} ms late")
    return lines
