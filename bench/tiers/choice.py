"""Which measurements to run, and with which sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from bench.errors import BenchFailed
from bench.in_process import server_loop
from bench.tiers import decode, long, many, restore, rss, wake
from bench.tiers.decode import DecodePlan, DecodeSamples
from bench.tiers.long import LongPlan, LongSamples
from bench.tiers.many import ManyPlan, ManySamples
from bench.tiers.restore import RestorePlan, RestoreSamples
from bench.tiers.rss import RssPlan, RssSamples
from bench.tiers.wake import WakePlan, WakeSamples

if TYPE_CHECKING:
    from bench.tiers.rig import Model

Plan = WakePlan | RestorePlan | DecodePlan | RssPlan | LongPlan | ManyPlan
Samples = WakeSamples | RestoreSamples | DecodeSamples | RssSamples | LongSamples | ManySamples

PLANS: dict[str, type[Plan]] = {
    "wake": WakePlan,
    "restore": RestorePlan,
    "decode": DecodePlan,
    "rss": RssPlan,
    "long": LongPlan,
    "many": ManyPlan,
}
"""By name, in the order they run in: what is soon over comes first."""

FIELDS: dict[str, dict[str, str]] = {
    "wake": {"rounds": "rounds", "tokens": "tokens"},
    "restore": {"lengths": "lengths", "rounds": "rounds"},
    "decode": {
        "decode_tokens": "tokens",
        "window_tokens": "window_tokens",
        "sleeps_per_second": "sleeps_per_second",
    },
    "rss": {"cycles": "cycles"},
    "long": {
        **{"sessions": "sessions", "tokens": "tokens", "hbm_sessions": "hbm_sessions"},
        "dram_sessions": "dram_sessions",
    },
    "many": {
        **{"sessions": "sessions", "tokens": "tokens", "hbm_sessions": "hbm_sessions"},
        **{"turns": "turns", "in_flight": "in_flight"},
    },
}
"""Which field of its plan a flag sets, by measurement."""


Size = int | tuple[int, ...]


def plans(chosen: Sequence[str], given: Mapping[str, Size | None], seed: int) -> dict[str, Plan]:
    """The plan of each of `chosen`, all where none is; sizes that are None keep their defaults.

    Raises:
        BenchFailed: a size is of none of them, or of several, whose defaults differ.
    """
    names = [name for name in PLANS if name in chosen or not chosen]
    sizes: dict[str, dict[str, Size]] = {name: {} for name in names}
    for flag, value in given.items():
        if value is not None:
            taker = _taker(flag, names)
            sizes[taker][FIELDS[taker][flag]] = value
    return {name: PLANS[name](**sizes[name], seed=seed) for name in names}  # type: ignore[arg-type]


def _taker(flag: str, names: Sequence[str]) -> str:
    takers = [name for name in names if flag in FIELDS[name]]
    if len(takers) != 1:
        able = " or ".join(f"--{name}" for name in PLANS if flag in FIELDS[name])
        said = f"--{flag.replace('_', '-')}"
        raise BenchFailed(f"{said} is a size of one measurement: give {able} and no other that has it")
    return takers[0]


def run(model: Model, plan: Plan, done: Callable[[str], None], place: Path | None = None) -> Samples:
    """Carry out `plan` on the event loop that `dormouse serve` runs on; NVMe's files lie in `place` for the while.

    Raises:
        BenchFailed: no figure came of it.
    """
    with server_loop() as runner:
        match plan:
            case WakePlan():
                return runner.run(wake.measure(model, plan, done))
            case RestorePlan():
                return runner.run(restore.measure(model, plan, done, place))
            case DecodePlan():
                return runner.run(decode.measure(model, plan, done))
            case RssPlan():
                return runner.run(rss.measure(model, plan, done))
            case LongPlan():
                return runner.run(long.measure(model, plan, done, place))
            case ManyPlan():
                return runner.run(many.measure(model, plan, done))
            case _:
                assert_never(plan)
