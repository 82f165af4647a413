"""One turn from its lease to its record.

    prepared    on its branch, which is busy from now on
    begin       waits for the lease; a refusal changes nothing
    texts       what the client sees, piece by piece; the last one completes the branch, or raises
    close       the lease back, the branch free again, one log line, the counters; always called, once

Nobody but `close` lets go of anything, so whatever raises or is cancelled in between needs no cleaning up of its own.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from app import report
from kvstore.errors import ContextTooLong, QueueFull, ShuttingDown, TurnFailed
from kvstore.types import StopReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from app.gateway import Gateway
    from app.report import Standing
    from app.sse import Head
    from kvstore.lease import Lease
    from kvstore.sessions import OpenTurn
    from kvstore.types import TurnProgress, TurnSpec
    from models.chat import Encoded
    from models.rendering import Rendered

logger = logging.getLogger("dormouse.turns")

REFUSED = {QueueFull: "queue_full", ContextTooLong: "context_too_long", ShuttingDown: "shutting_down"}


class Turn:
    """A request on its way to an answer; owns the lease and the branch's busy mark."""

    def __init__(
        self,
        gateway: Gateway,
        head: Head,
        standing: Standing,
        spec: TurnSpec,
        place: OpenTurn,
        rendered: Rendered,
        encoded: Encoded,
        arrived: float,
    ) -> None:
        self.head = head
        self.standing = standing
        self.finish_reason = ""
        self.is_dismissed = False
        self._gateway = gateway
        self._spec = spec
        self._place = place
        self._rendered = rendered
        self._encoded = encoded
        self._arrived = arrived
        self._figures = report.Figures()
        self._outcome = "cancelled"  # until something else is known: the client went away
        self._text = ""
        self._lease: Lease | None = None
        self._is_closed = False

    @property
    def session_id(self) -> str:
        """The id this turn runs under, given or made."""
        return self.standing.session_id

    async def begin(self) -> None:
        """Wait until the turn is granted and running.

        Raises:
            QueueFull, ContextTooLong, ShuttingDown: it will not run.
        """
        try:
            lease = await self._gateway.manager.acquire(self._spec)
        except (QueueFull, ContextTooLong, ShuttingDown) as refusal:
            self._outcome = REFUSED[type(refusal)]
            raise
        self._lease = lease
        self._figures.reused = dict(lease.grant.reused)
        self._figures.queue_seconds = lease.grant.queue_seconds
        self._figures.granted_at = self._now()

    async def texts(self) -> AsyncIterator[str]:
        """Visible text as it comes; afterwards the branch is recorded and `finish_reason` is set.

        Raises:
            TurnFailed: the engine raised while computing this turn.
            ShuttingDown: the drain's time was up.
        """
        assert self._lease is not None, "begin() comes first"
        async for piece in self._lease.pieces():
            self._count(piece)
            if piece.text:
                self._text += piece.text
                yield piece.text
            if piece.stopped is not None:
                await self._end(piece, piece.stopped)

    def _count(self, piece: TurnProgress) -> None:
        if piece.new_token_ids:
            self._figures.last_token_at = self._now()
            if self._figures.first_token_at is None:
                self._figures.first_token_at = self._figures.last_token_at
            self._figures.output_tokens += len(piece.new_token_ids)

    async def _end(self, piece: TurnProgress, stopped: StopReason) -> None:
        """The engine let go of the turn: record it, count it, and only then let the last bytes or the error leave."""
        error: Exception | None = None
        match stopped:
            case StopReason.STOP | StopReason.LENGTH:
                await self._record(piece.kept_tokens)
                self.finish_reason = self._outcome = stopped.value
            case StopReason.FAILED:
                self._outcome = "failed"
                logger.error("turn of session %s failed: %s", self.session_id, piece.error)
                error = TurnFailed(piece.error or "unknown")
            case StopReason.CANCELLED:
                # Its reader is still here, so it was the drain that cancelled it.
                self._outcome = "shutting_down"
                error = ShuttingDown()
            case StopReason.SUSPENDED:
                raise AssertionError("a suspended turn has not ended")
        await self.close()
        if error is not None:
            raise error

    async def _record(self, kept_tokens: int) -> None:
        """Before the last byte leaves: the client's next turn may follow it at once."""
        assert self._lease is not None
        if not self._spec.cache:
            return
        start = len(self._spec.token_ids)
        output_ids = self._lease.token_ids[start : start + kept_tokens]
        chat = self._gateway.chat
        history = await self._gateway.in_thread(chat.close, self._rendered, self._encoded, output_ids, self._text)
        self._gateway.book.record(self._place, history, time.monotonic())

    def dismiss(self) -> None:
        """Note that it is the server that ends this turn."""
        self.is_dismissed = True
        self._outcome = "shutting_down"

    async def close(self) -> None:
        """Give everything back; returns when every slot is. Idempotent; the caller shields it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._place.is_open:
            self._gateway.book.abandon(self._place)
        if self._lease is not None:
            await self._lease.close()
            self._figures.stored_tokens = self._lease.stored_tokens
        self._tell()

    # --- what is told of it -----------------------------------------------------------------

    def session_as_granted(self) -> dict[str, object]:
        """`session` as far as the grant knows it."""
        return report.session_as_granted(self.standing, self._figures)

    def session(self) -> dict[str, object]:
        """The whole `session` object."""
        return report.session(self.standing, self._figures)

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        return report.usage(self.standing, self._figures)

    def timings(self) -> dict[str, object]:
        """llama-server's `timings`."""
        return report.timings(self.standing, self._figures)

    def _tell(self) -> None:
        standing, figures = self.standing, self._figures
        self._gateway.metrics.count(self._outcome, standing, figures, self._now())
        logger.info("turn", extra={"fields": report.log_fields(self._outcome, standing, figures, self._now())})

    def _now(self) -> float:
        return time.monotonic() - self._arrived
