"""Scripts of events for the planner: short keys, short names, check() after every event.

Blocks hold 4 tokens. `keys("abc")` is the chain of three blocks named by their path: two
chains share what they share as text, so `keys("abx")` has the first two blocks of it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvstore.events import Fill, GrantTurn, GrowWanted, StepEnded, SuspendTurn, TurnArrived, TurnStopped
from kvstore.planner import Planner, PlannerConfig
from kvstore.types import BlockKey, StopReason, TurnId

if TYPE_CHECKING:
    from kvstore.events import Action, Event

BLOCK_TOKENS = 4


def keys(path: str) -> tuple[BlockKey, ...]:
    """The chain of `len(path)` blocks; equal prefixes of paths are equal blocks."""
    return tuple(BlockKey(blake2b(path[:end].encode(), digest_size=16).digest()) for end in range(1, len(path) + 1))


class Script:
    """A planner, a clock that stands until told otherwise, and the events of turns named by integers."""

    def __init__(
        self,
        hbm_slots: int = 8,
        max_running: int = 8,
        max_queue: int = 8,
        age_limit_seconds: float = 10.0,
        output_slice_tokens: int = 4,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.paths: dict[int, str] = {}
        self.planner = Planner(
            PlannerConfig(
                hbm_slots=hbm_slots,
                block_tokens=BLOCK_TOKENS,
                max_running=max_running,
                max_queue=max_queue,
                age_limit_seconds=age_limit_seconds,
                output_slice_tokens=output_slice_tokens,
                **more,
            )
        )

    def feed(self, event: Event) -> list[Action]:
        actions = self.planner.handle(event, self.now)
        self.planner.check()
        return actions

    def arrive(
        self, turn: int, path: str, output_tokens: int = 4, priority: int = 0, cache: bool = True
    ) -> list[Action]:
        """A turn whose prompt is the blocks of `path` and one token more."""
        self.paths[turn] = path
        prompt_tokens = len(path) * BLOCK_TOKENS + 1
        return self.feed(
            TurnArrived(TurnId(turn), keys(path) if cache else (), prompt_tokens, output_tokens, priority, cache)
        )

    def fills(self, turn: int, *indices: int, path: str | None = None) -> tuple[Fill, ...]:
        chain = keys(self.paths[turn] if path is None else path)
        return tuple(Fill(TurnId(turn), index, chain[index]) for index in indices)

    def fill(self, turn: int, *indices: int, path: str | None = None) -> list[Action]:
        return self.feed(StepEnded(self.fills(turn, *indices, path=path)))

    def stop(self, turn: int, reason: StopReason = StopReason.STOP, tokens: int | None = None) -> list[Action]:
        tokens = len(self.paths[turn]) * BLOCK_TOKENS + 1 if tokens is None else tokens
        return self.feed(StepEnded((), (TurnStopped(TurnId(turn), reason, tokens),)))

    def grow(self, turn: int, slots: int = 1) -> list[Action]:
        return self.feed(GrowWanted(TurnId(turn), slots))

    def run(self, turn: int, path: str) -> None:
        """A whole turn that fills every block of `path` and stops."""
        (grant,) = [action for action in self.arrive(turn, path) if isinstance(action, GrantTurn)]
        self.fill(turn, *range(grant.cached_tokens // BLOCK_TOKENS, len(path)))
        self.stop(turn)

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        actions = self.planner.handle_timeout(self.now)
        self.planner.check()
        return actions

    def counts(self) -> dict[str, int]:
        """HBM slots by state."""
        hbm = self.planner.snapshot().tiers[0]
        return {"free": hbm.free, "open": hbm.open, "valid": hbm.valid, "pinned": hbm.pinned}

    def cached(self, path: str) -> int:
        """How many blocks of `path` a turn would be granted from the cache, told by a turn that comes and goes."""
        turn = 1_000_000 + len(self.paths)
        grants = [action for action in self.arrive(turn, path, output_tokens=0) if isinstance(action, GrantTurn)]
        self.stop(turn, StopReason.CANCELLED)
        return grants[0].cached_tokens // BLOCK_TOKENS


def granted(actions: list[Action]) -> list[int]:
    return [action.turn for action in actions if isinstance(action, GrantTurn)]


def suspended(actions: list[Action]) -> list[int]:
    return [action.turn for action in actions if isinstance(action, SuspendTurn)]
