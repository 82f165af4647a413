"""What is measured against peers, and the project's own bars: first the floor, then the goal, as ratios."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bars:
    """Of ours over the peer's where less is better; of the peer's over ours for `faster` lines."""

    floor: float
    goal: float


@dataclass(frozen=True, slots=True)
class Line:
    """One row. `group` is measured in one go; `bars` are by kind of peer, `better` meaning whichever peer is better."""

    name: str
    group: str
    unit: str
    is_more_better: bool
    is_faster: bool = False
    """Shown as how many times faster ours is: the peer's over ours."""
    factor: float = 1.0
    bars: dict[str, Bars] = field(default_factory=dict)


CONTEXTS = (140, 2000, 5500)
STREAMS = (4, 16)

LINES = (
    Line("decode 140", "chat", "ms/token", False, factor=1e3, bars={"llama-server": Bars(1.6, 1.0)}),
    Line(
        *("decode 2000", "chat", "ms/token", False),
        factor=1e3,
        bars={"llama-server": Bars(1.5, 0.9), "vllm": Bars(0.6, 0.35)},
    ),
    Line(
        *("decode 5500", "chat", "ms/token", False),
        factor=1e3,
        bars={"llama-server": Bars(1.0, 0.75), "vllm": Bars(0.6, 0.35)},
    ),
    Line("prefill 2000", "chat", "tok/s", True, bars={"better": Bars(1.2, 1.6)}),
    Line("prefill 5500", "chat", "tok/s", True, bars={"better": Bars(1.2, 1.6)}),
    Line("next turn 5500", "chat", "ms", False, factor=1e3, bars={"better": Bars(1.0, 0.5)}),
    Line(
        *("16 streams", "streams", "tok/s", True),
        bars={"llama-server": Bars(1.0, 1.4), "vllm": Bars(1.2, 1.6)},
    ),
    Line("4 streams", "streams", "tok/s", True, bars={"llama-server": Bars(0.9, 1.2)}),
    Line(
        *("next turn 5500 after a restart", "restart", "ms", False),
        is_faster=True,
        factor=1e3,
        bars={"llama-server": Bars(20, 40), "vllm": Bars(20, 40)},
    ),
    Line(
        *("256 sessions, mean TTFT of turns 2-4", "sessions", "ms", False),
        is_faster=True,
        factor=1e3,
        bars={"llama-server": Bars(3, 8), "vllm": Bars(3, 8)},
    ),
)
GROUPS = ("chat", "streams", "restart", "sessions")


def of(groups: list[str]) -> list[Line]:
    """The lines of these groups, in their order."""
    return [line for line in LINES if line.group in groups]
