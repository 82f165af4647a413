"""A stand-in for the engine: words at a given pace, one a step for every turn, from a thread of its own.

It computes nothing, so what is left is the gateway: store, HTTP, event loop. A step gives every running turn one token
at once, as a real step does, and so comes to the loop as one burst.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.types import StepReport, StopReason, TurnId, TurnProgress, TurnSpec

HELD_SECONDS = 120.0
"""For the last of a window's turns; were it refused, the others must still end."""

WORDS = (" One", " two", " three", " four", " five", " six", " seven", " eight")


@dataclass(slots=True)
class _Run:
    spec: TurnSpec
    slots: int
    said: int = 0

    @property
    def tokens(self) -> int:
        return len(self.spec.token_ids) + self.said


@dataclass(frozen=True, slots=True)
class Mark:
    """A step in which every turn of the window ran: when it was published, and the watched thread's CPU until then."""

    at: float
    cpu_seconds: float


@dataclass(slots=True)
class Marks:
    """Of one window."""

    streams: int
    steps: list[Mark] = field(default_factory=list)


class StandInEngine:
    """A TurnEngine of `steps_per_second`; `token_ids` are those of WORDS."""

    def __init__(
        self,
        block_tokens: int,
        steps_per_second: float,
        token_ids: Sequence[int],
        on_step: Callable[[StepReport], None],
        watched_thread: int,
    ) -> None:
        self._block_tokens = block_tokens
        self._period_seconds = 1 / steps_per_second
        self._token_ids = token_ids
        self._on_step = on_step
        self._watched_clock = time.pthread_getcpuclockid(watched_thread)
        self._lock = threading.Lock()
        self._running: dict[TurnId, _Run] = {}
        self._suspended: dict[TurnId, _Run] = {}
        self._stopped: list[TurnProgress] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="stand-in-engine")
        self.marks = Marks(0)
        self._held_until = 0.0
        self.cpu_seconds = 0.0
        """Of this thread, so far."""

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End it; blocking."""
        self._ending.set()
        self._thread.join()

    def watch(self, streams: int) -> Marks:
        """Say nothing until so many turns run, then note the steps in which all of them do."""
        with self._lock:
            self.marks = Marks(streams)
            self._held_until = time.perf_counter() + HELD_SECONDS
        return self.marks

    # --- TurnEngine ---------------------------------------------------------------------------

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        with self._lock:
            self._running[turn] = _Run(spec, len(slots))

    def extend(self, turn: TurnId, slots: Sequence[int]) -> None:
        with self._lock:
            if turn in self._running:
                self._running[turn].slots += len(slots)

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        with self._lock:
            run = self._suspended.pop(turn)
            run.slots = len(slots)
            self._running[turn] = run

    def stop(self, turn: TurnId, reason: StopReason) -> None:
        with self._lock:
            run = self._running.pop(turn, None)
            if run is None:
                self._suspended.pop(turn, None)
                return
            if reason is StopReason.SUSPENDED:
                self._suspended[turn] = run
            self._stopped.append(TurnProgress(turn, run.tokens, stopped=reason, kept_tokens=run.said))

    # --- its thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        due = time.perf_counter()
        while not self._ending.is_set():
            due += self._period_seconds
            if (wait := due - time.perf_counter()) > 0:
                self._ending.wait(wait)
            else:
                due = time.perf_counter()
            self._step()
            self.cpu_seconds = time.thread_time()

    def _step(self) -> None:
        with self._lock:
            if len(self._running) >= self.marks.streams or time.perf_counter() > self._held_until:
                self._held_until = 0.0
            running = {} if self._held_until else self._running
            said = [self._say(turn, run) for turn, run in running.items() if self._has_room(run)]
            for piece in said:
                if piece.stopped is not None:
                    del self._running[piece.turn]
            report = StepReport(said + self._stopped, self._period_seconds, decode_tokens=len(said))
            self._stopped = []
        if len(said) == self.marks.streams and not any(piece.stopped for piece in said):
            self.marks.steps.append(Mark(time.perf_counter(), time.clock_gettime(self._watched_clock)))
        if report.progress:
            self._on_step(report)

    def _has_room(self, run: _Run) -> bool:
        return run.tokens <= run.slots * self._block_tokens

    def _say(self, turn: TurnId, run: _Run) -> TurnProgress:
        index = run.said % len(WORDS)
        run.said += 1
        is_last = run.said >= run.spec.max_new_tokens
        # The token said now has no K/V yet, as in the engine.
        return TurnProgress(
            turn,
            run.tokens - 1,
            new_token_ids=[self._token_ids[index]],
            text=WORDS[index],
            stopped=StopReason.LENGTH if is_last else None,
            kept_tokens=run.said if is_last else 0,
        )
