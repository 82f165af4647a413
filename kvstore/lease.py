"""A turn's hold on its slots, as the HTTP layer sees it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvstore.types import Tier, TurnId, TurnProgress

if TYPE_CHECKING:
    from kvstore.events import Miss

WakeTrigger = Literal["arrival", "hint", "queue"]


@dataclass(frozen=True, slots=True)
class Grant:
    """What a turn got: `cached_tokens` of its prompt need no computing; `reused` says from which tier they came.

    `reused` counts by the deepest tier a block was read from since its last turn; `miss` says why
    blocks that were stored could not be used. `queue_seconds` were spent waiting for room,
    `wake_seconds` for what slept, and `wake_trigger` set that off: a hint, the turn's arrival, or
    its place in the queue.
    """

    turn: TurnId
    cached_tokens: int
    queue_seconds: float
    reused: dict[Tier, int] = field(default_factory=dict)
    miss: Miss | None = None
    wake_seconds: float = 0.0
    wake_trigger: WakeTrigger | None = None


class Lease:
    """Keeps one turn's slots from being reused until it stopped.

    Close it in the `finally` of the object that acquired it, never in a generator's: a
    generator that is dropped runs its `finally` when the collector feels like it
    (sglang-omni #1080, sse-starlette #156).
    """

    def __init__(self, grant: Grant, token_ids: array[int], cancel: Callable[[], None]) -> None:
        self.turn = grant.turn
        self.grant = grant
        self.token_ids = token_ids
        """Prompt and output so far."""
        self.stored_tokens = 0
        """Tokens of full blocks this turn computed and left to be reused."""
        self._cancel = cancel
        self._has_answered = False
        self._on_answer: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._unread: TurnProgress | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    async def pieces(self) -> AsyncIterator[TurnProgress]:
        """What the turn produced, in order, up to the piece whose `stopped` is set.

        A reader slower than the engine gets several steps merged into one piece, so nothing
        queues up without bound.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            piece, self._unread = self._unread, None
            if piece is None:
                continue
            yield piece
            if piece.stopped is not None:
                return

    async def close(self) -> None:
        """Cancel the turn if it still runs and wait until its slots are free; a branch it left is recorded before.

        Idempotent. Cancelling the caller does not cancel the cleaning up.
        """
        self._cancel()
        await self._ended.wait()

    def watch(self, on_answer: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Call `on_answer` with the first token and `on_end` once the slots are free, each once, or at once where that
        was already."""
        self._on_answer, self._on_end = on_answer, on_end
        if self._has_answered:
            on_answer()
        if self._ended.is_set():
            on_end()

    # --- the manager's side -------------------------------------------------------------

    def deliver(self, piece: TurnProgress) -> None:
        """Hand a piece to the reader, merged with what it has not read yet."""
        if self._unread is not None:
            piece = _merged(self._unread, piece)
        self._unread = piece
        self._news.set()
        if piece.new_token_ids and not self._has_answered:
            self._has_answered = True
            if self._on_answer is not None:
                self._on_answer()

    def end(self) -> None:
        """The turn's slots are free."""
        if not self._ended.is_set() and self._on_end is not None:
            self._on_end()
        self._ended.set()


def _merged(earlier: TurnProgress, later: TurnProgress) -> TurnProgress:
    return TurnProgress(
        turn=later.turn,
        computed_tokens=later.computed_tokens,
        new_token_ids=earlier.new_token_ids + later.new_token_ids,
        text=earlier.text + later.text,
        stopped=later.stopped,
        stop_string=later.stop_string,
        kept_tokens=later.kept_tokens,
        error=later.error,
        notes=earlier.notes + later.notes,
        prompt_notes=earlier.prompt_notes + later.prompt_notes,
    )
