"""One turn from its lease to its record.

    prepared    on its branch, which is busy from now on
    pieces      waits for the lease (a refusal changes nothing), then what the client sees, piece by piece; before the
                last one the branch is complete, or an error is raised
    close       the lease back, the branch free again, one log line, the counters; always called, once

Nobody but `close` lets go of anything, so whatever raises or is cancelled in between needs no cleaning up of its own.

A turn without a `place` is a further choice: it follows its `leader`, whose prompt it finds in the cache, and no
branch remembers it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app import report, traces
from app.keeper import Written, written
from kvstore import replies
from kvstore.errors import ContextTooLong, QueueFull, ShuttingDown, TurnFailed
from kvstore.history import History
from kvstore.reuse import MissReason
from kvstore.terms import Persist
from kvstore.types import StopReason, Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from app.gateway import Gateway
    from app.replies import ReplyDraft
    from app.report import Standing
    from app.store import Wake
    from kvstore.history import Reply
    from kvstore.lease import Grant, Lease
    from kvstore.session import OpenTurn
    from kvstore.types import TurnProgress, TurnSpec
    from models.chat import Encoded
    from models.rendering import Rendered

logger = logging.getLogger("dormouse.turns")

COMMIT_SECONDS = 0.25
"""A disk that takes longer to take a turn's record is not waited for."""

REFUSED = {QueueFull: "queue_full", ContextTooLong: "context_too_long", ShuttingDown: "shutting_down"}


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one choice: text, as many tokens, notes on tokens; the first piece has nothing yet."""

    choice: int
    text: str = ""
    tokens: int = 0
    notes: Sequence[object] = ()
    prompt_notes: Sequence[object] = ()
    is_first: bool = False
    finish_reason: str | None = None
    stop_string: str | None = None
    """The one that was met, beside the finish reason."""


class Turn:
    """A prompt on its way to an answer; owns the lease and the branch's busy mark."""

    def __init__(
        self,
        gateway: Gateway,
        standing: Standing,
        spec: TurnSpec,
        rendered: Rendered,
        encoded: Encoded,
        arrived: float,
        *,
        choice: int = 0,
        place: OpenTurn | None = None,
        wake: Wake | None = None,
        leader: Turn | None = None,
    ) -> None:
        self.choice = choice
        self.standing = standing
        self.spec = spec
        self.rendered = rendered
        self.encoded = encoded
        self.figures = report.Figures()
        self.finish_reason = ""
        self.stop_string: str | None = None
        self.is_dismissed = False
        self.left: Written | None = None
        """What a further choice wrote, which belongs to no branch."""
        self.reply: ReplyDraft | None = None
        """What the branch keeps of the answer besides, so that a client can go on from it by its id."""
        self._gateway = gateway
        self._place = place
        self._wake = wake
        self._leader = leader
        self._arrived = arrived
        self._outcome = "cancelled"  # until something else is known: the client went away
        self._text = ""
        self._lease: Lease | None = None
        self._is_closed = False
        self._has_answered = asyncio.Event()
        self._within = traces.parent.get()

    def follower(self, choice: int, spec: TurnSpec) -> Turn:
        """A further choice of the same prompt."""
        return Turn(
            self._gateway,
            self.standing,
            spec,
            self.rendered,
            self.encoded,
            self._arrived,
            choice=choice,
            leader=self,
        )

    @property
    def session_id(self) -> str:
        """The id this turn runs under, given or made."""
        return self.standing.session_id

    @property
    def has_own_prompt(self) -> bool:
        """It is no further choice of another's prompt."""
        return self._leader is None

    async def pieces(self) -> AsyncIterator[Piece]:
        """An empty piece once the turn is granted, then text as it comes, then the finish reason.

        Raises:
            QueueFull, ContextTooLong, ShuttingDown: it will not run; nothing was yielded.
            TurnFailed: the engine raised while computing this turn.
            ShuttingDown: the drain's time was up.
        """
        if self._leader is not None:
            # Its first token says that the prompt's blocks are there to be shared.
            await self._leader._has_answered.wait()
        await self._begin()
        assert self._lease is not None
        yield Piece(self.choice, is_first=True)
        async for progress in self._lease.pieces():
            self._count(progress)
            if progress.text or progress.notes or progress.prompt_notes:
                self._text += progress.text
                tokens = len(progress.new_token_ids)
                yield Piece(self.choice, progress.text, tokens, progress.notes, progress.prompt_notes)
            if progress.stopped is not None:
                await self._end(progress, progress.stopped)
        yield Piece(self.choice, finish_reason=self.finish_reason, stop_string=self.stop_string)

    async def _begin(self) -> None:
        try:
            lease = await self._gateway.queue.acquire(self.spec)
        except (QueueFull, ContextTooLong, ShuttingDown) as refusal:
            self._outcome = REFUSED[type(refusal)]
            raise
        self._lease = lease
        self._take_note(lease.grant)

    def _take_note(self, grant: Grant) -> None:
        figures = self.figures
        figures.reused = dict(grant.reused)
        figures.queue_seconds = grant.queue_seconds
        figures.wake_seconds, figures.wake_trigger = grant.wake_seconds, grant.wake_trigger
        if grant.miss is not None:
            figures.miss = MissReason(grant.miss.value)
        figures.granted_at = self._now()
        self._gateway.board.turn_granted(self._place, grant.wake_trigger)
        slept = {tier: tokens for tier, tokens in grant.reused.items() if tokens and tier is not Tier.HBM}
        if slept:
            self._gateway.hints.pace.observe(max(slept), sum(slept.values()), grant.wake_seconds)

    def _count(self, piece: TurnProgress) -> None:
        if piece.new_token_ids:
            self._has_answered.set()
            self.figures.last_token_at = self._now()
            if self.figures.first_token_at is None:
                self.figures.first_token_at = self.figures.last_token_at
            self.figures.output_tokens += len(piece.new_token_ids)

    async def _end(self, piece: TurnProgress, stopped: StopReason) -> None:
        """The engine let go of the turn: record it, count it, and only then let the last bytes or the error leave."""
        error: Exception | None = None
        match stopped:
            case StopReason.STOP | StopReason.LENGTH:
                await self._record(piece.kept_tokens)
                self.finish_reason = self._outcome = stopped.value
                self.stop_string = piece.stop_string
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
        if self._place is None or not self.spec.cache or self._place.terms.persist is Persist.NONE:
            return
        history, blocks = await self._gateway.in_thread(self._history, kept_tokens)
        self._gateway.keeper.record(self._place, history, blocks)
        # Whoever has the last byte may believe that the turn survives a kill: milliseconds, unless the disk hangs.
        await self._gateway.keeper.settled(COMMIT_SECONDS)

    def _history(self, kept_tokens: int) -> tuple[History, Written]:
        """Slow, and touches only what belongs to this turn."""
        assert self._lease is not None
        start = len(self.spec.token_ids)
        output_ids = self._lease.token_ids[start : start + kept_tokens]
        history = self._gateway.chat.close(self.rendered, self.encoded, output_ids, self._text)
        earlier = self._earlier_replies()
        if self.reply is None:
            history = replies.carry(history, earlier)
        else:
            history = self.reply.kept(history, earlier, self._text)
        return history, self._written(len(history.token_ids))

    def _earlier_replies(self) -> Sequence[Reply]:
        """Of the branch, which is this turn's alone until it is recorded."""
        former = None if self._place is None else self._place.branch.history
        return former.replies if isinstance(former, History) else ()

    def _written(self, history_tokens: int = 0) -> Written:
        """The blocks this turn filled, or found filled."""
        assert self._lease is not None
        return written(
            self._lease.token_ids,
            self._gateway.block_tokens,
            self.spec.namespace,
            computed_tokens=self._lease.grant.cached_tokens + self._lease.stored_tokens,
            history_tokens=history_tokens,
        )

    def dismiss(self) -> None:
        """Note that it is the server that ends this turn."""
        self.is_dismissed = True
        self._outcome = "shutting_down"

    async def close(self) -> None:
        """Give everything back; returns when every slot is. Idempotent; the caller shields it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._has_answered.set()
        if self._lease is not None:
            await self._lease.close()
            self.figures.stored_tokens = self._lease.stored_tokens
        elif self._wake is not None:
            self._wake.cancel()
        blocks = self._written() if self._lease is not None and self.spec.cache else None
        if self._place is None:
            self.left = blocks
        elif self._place.is_open:
            self._gateway.keeper.abandon(self._place, blocks)
        self._tell()

    def clear_up_after(self, follower: Turn) -> None:
        """What a further choice wrote beyond this turn's branch goes first; both have ended."""
        if follower.left is not None and self._place is not None:
            self._gateway.keeper.beside(self._place, follower.left)

    def _tell(self) -> None:
        standing, figures = self.standing, self.figures
        self._gateway.metrics.count(self._outcome, standing, figures, self._now())
        seconds = self._now()
        self._gateway.board.turn_ended(self._outcome, standing, figures, seconds, self._place)
        self._gateway.traces.tell(self._outcome, standing, figures, seconds, self._within)
        logger.info(
            "turn", extra={"fields": {**self._texts(), **report.log_fields(self._outcome, standing, figures, seconds)}}
        )

    def _texts(self) -> dict[str, object]:
        """Nothing, unless whoever runs this has asked for it."""
        if not self._gateway.settings.log_prompts:
            return {}
        return {"prompt_text": self.rendered.text, "answer_text": self._text}

    def _now(self) -> float:
        return time.monotonic() - self._arrived
