"""A model whose every word depends on every bit of its cache, and the thread that computes with it.

Crash rounds are about bytes: which of them are where after a kill. A random network forgives much (a wrong block
changes the next word now and then), takes seconds to import and load, and rounds differently from one batch to the
next. This one forgives nothing, starts in no time and is exact:

    K/V of a token   512 bytes drawn from the token and a digest of the K/V of all tokens before it
    next token       a digest of the K/V of all tokens so far

Both read what lies in the arena's slots, in every step, as attention does. So a block of other bytes anywhere, or one
that was overwritten under a running turn, changes all that is said from there on. The embedded model behind the real
server has its own rounds (tests.crash.torture).
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from kvstore.tiers.dram import DramSlab
from kvstore.types import StepReport, StopReason, Tier, TurnProgress

if TYPE_CHECKING:
    from kvstore.types import TurnId, TurnSpec

BLOCK_TOKENS = 16
TOKEN_BYTES = 512
SLOT_BYTES = BLOCK_TOKENS * TOKEN_BYTES
VOCABULARY = 50_000
CHUNK_TOKENS = 96
"""Computed for one turn in one step."""


class Context:
    """What the model makes of a sequence, with nothing stored: the control that is never killed."""

    def __init__(self) -> None:
        self._seen = xxhash.xxh3_128()

    def see(self, kv: memoryview | bytes) -> None:
        """These are the K/V of the next tokens."""
        self._seen.update(kv)

    def kv(self, token: int) -> bytes:
        """Of `token`, coming next; seen from now on."""
        kv = hashlib.shake_128(self._seen.digest() + token.to_bytes(4, "little")).digest(TOKEN_BYTES)
        self._seen.update(kv)
        return kv

    def next_token(self) -> int:
        return int.from_bytes(self._seen.digest(), "little") % VOCABULARY

    def answer(self, prompt: Iterable[int], count: int) -> list[int]:
        """`count` tokens after `prompt`, which comes after what was seen; the last one is not seen yet."""
        said: list[int] = []
        for token in prompt:
            self.kv(token)
        while True:
            said.append(self.next_token())
            if len(said) == count:
                return said
            self.kv(said[-1])


class Arena(DramSlab):
    """HBM of a machine without a GPU: memory in slots."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, SLOT_BYTES)
        self.tier = Tier.HBM


@dataclass(slots=True)
class _Run:
    spec: TurnSpec
    tokens: array[int]
    slots: list[int]
    computed: int
    said: list[int] = field(default_factory=list)


class Engine:
    """Steps of all turns on a thread of its own, as models.engine has them; `on_step` is called from there."""

    def __init__(self, arena: Arena, on_step: Callable[[StepReport], None]) -> None:
        self._arena = arena
        self._on_step = on_step
        self._running: dict[TurnId, _Run] = {}
        self._suspended: dict[TurnId, _Run] = {}
        self._stopped: list[TurnProgress] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    # --- TurnEngine -----------------------------------------------------------------------------

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        self._run(turn, _Run(spec, array("I", spec.token_ids), list(slots), cached_tokens))

    def extend(self, turn: TurnId, slots: Sequence[int]) -> None:
        with self._changed:
            if turn in self._running:
                self._running[turn].slots.extend(slots)
                self._changed.notify()

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        with self._changed:
            run = self._suspended.pop(turn)
        run.computed, run.slots = cached_tokens, list(slots)
        self._run(turn, run)

    def stop(self, turn: TurnId, reason: StopReason) -> None:
        with self._changed:
            run = self._running.pop(turn, None)
            if run is None:
                self._suspended.pop(turn, None)
                return
            if reason is StopReason.SUSPENDED:
                self._suspended[turn] = run
            self._stopped.append(TurnProgress(turn, run.computed, stopped=reason, kept_tokens=len(run.said)))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self, turn: TurnId, run: _Run) -> None:
        with self._changed:
            self._running[turn] = run
            self._changed.notify()

    # --- the thread -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._is_closing or self._stopped or any(map(_can_go_on, self._running.values()))):
                    self._changed.wait()
                if self._is_closing:
                    return
                report = StepReport([], seconds=0.001)
                for turn, run in list(self._running.items()):
                    if _can_go_on(run):
                        report.progress.append(self._step(turn, run))
                report.progress += self._stopped
                self._stopped = []
            self._on_step(report)

    def _step(self, turn: TurnId, run: _Run) -> TurnProgress:
        context = Context()
        for place in range(-(-run.computed // BLOCK_TOKENS)):
            held = min(BLOCK_TOKENS, run.computed - place * BLOCK_TOKENS)
            context.see(self._arena.view(run.slots[place])[: held * TOKEN_BYTES])
        end = min(len(run.tokens), run.computed + CHUNK_TOKENS)
        for place in range(run.computed, end):
            block, inside = divmod(place, BLOCK_TOKENS)
            slot = self._arena.view(run.slots[block])
            slot[inside * TOKEN_BYTES : (inside + 1) * TOKEN_BYTES] = context.kv(run.tokens[place])
        run.computed = end
        progress = TurnProgress(turn, end)
        if end == len(run.tokens):
            token = context.next_token()
            progress.new_token_ids = [token]
            run.tokens.append(token)
            run.said.append(token)
            if len(run.said) == run.spec.max_new_tokens:
                progress.stopped, progress.kept_tokens = StopReason.LENGTH, len(run.said)
                del self._running[turn]
        return progress


def _can_go_on(run: _Run) -> bool:
    """It has room for all that it would compute next."""
    return min(len(run.tokens), run.computed + CHUNK_TOKENS) <= len(run.slots) * BLOCK_TOKENS
