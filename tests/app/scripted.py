"""A TurnEngine without a model: says the words it is given, one a step, on the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.types import StepReport, StopReason, TurnId, TurnProgress, TurnSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.manager import TierManager

EOS_ID = 2  # <|im_end|> of the embedded model's tokenizer
WORDS = ["One", " two", " three", " four", " five"]


@dataclass(slots=True)
class _Run:
    spec: TurnSpec
    words: list[str]
    slots: list[int]
    computed: int
    said: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.spec.token_ids) + len(self.said)


class ScriptedEngine:
    """Computes all prompts at once and then one token a step for every turn, while `pause` is not on.

    `script(spec)` gives a turn's words, each one token (`id_of`); `fail` makes steps fail their turns, the first few
    excepted; it pauses by itself after `pause_after_steps`.
    """

    def __init__(
        self,
        block_tokens: int,
        id_of: Callable[[str], int],
        script: Callable[[TurnSpec], Sequence[str]] | None = None,
    ) -> None:
        self.script = script or (lambda _spec: WORDS)
        self._id_of = id_of
        self.manager: TierManager | None = None
        self.is_paused = False
        self.fail = ""
        self.fail_after_steps = 0
        self.pause_after_steps: int | None = None
        self.steps = 0
        self.specs: list[TurnSpec] = []
        self._block_tokens = block_tokens
        self._running: dict[TurnId, _Run] = {}
        self._suspended: dict[TurnId, _Run] = {}
        self._stopped: list[TurnProgress] = []
        self._due: asyncio.Handle | None = None

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        self.specs.append(spec)
        self._running[turn] = _Run(spec, list(self.script(spec)), list(slots), cached_tokens)
        self._schedule()

    def extend(self, turn: TurnId, slots: Sequence[int]) -> None:
        if turn in self._running:
            self._running[turn].slots.extend(slots)
            self._schedule()

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        run = self._suspended.pop(turn)
        run.computed, run.slots = cached_tokens, list(slots)
        self._running[turn] = run
        self._schedule()

    def stop(self, turn: TurnId, reason: StopReason) -> None:
        run = self._running.pop(turn, None)
        if run is None:
            self._suspended.pop(turn, None)
            return
        if reason is StopReason.SUSPENDED:
            self._suspended[turn] = run
        self._stopped.append(TurnProgress(turn, run.computed, stopped=reason, kept_tokens=len(run.said)))
        self._schedule()

    def pause(self) -> None:
        """Compute nothing from now on; turns that are stopped are still reported."""
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False
        self._schedule()

    def _schedule(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._due = None
        assert self.manager is not None
        report = StepReport(progress=[], seconds=0.001)
        if not self.is_paused:
            self.steps += 1
            self.is_paused = self.steps == self.pause_after_steps
            report.progress = [piece for turn, run in list(self._running.items()) if (piece := self._one(turn, run))]
        report.progress += self._stopped
        self._stopped = []
        if report.progress:
            self.manager.step_ended(report)
        if self._running and not self.is_paused and report.progress:
            self._schedule()

    def _one(self, turn: TurnId, run: _Run) -> TurnProgress | None:
        if self.fail and self.steps > self.fail_after_steps:
            del self._running[turn]
            return TurnProgress(turn, 0, stopped=StopReason.FAILED, error=self.fail)
        if run.tokens > len(run.slots) * self._block_tokens:
            return None  # waits for slots
        run.computed = run.tokens
        return self._say(turn, run)

    def _say(self, turn: TurnId, run: _Run) -> TurnProgress:
        piece = TurnProgress(turn, run.computed)
        most = run.spec.max_new_tokens
        if len(run.said) < most:
            is_last = len(run.said) == len(run.words)
            piece.text = "" if is_last else run.words[len(run.said)]
            piece.new_token_ids = [EOS_ID if is_last else self._id_of(piece.text)]
            run.said += piece.new_token_ids
            piece.stopped = StopReason.STOP if is_last else StopReason.LENGTH if len(run.said) == most else None
        else:
            piece.stopped = StopReason.LENGTH
        if piece.stopped is not None:
            piece.kept_tokens = len(run.said)
            del self._running[turn]
        return piece
