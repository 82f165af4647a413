"""All turns that answer one request: its prompts, and the choices of each.

A request with one prompt and one choice, which is nearly all of them, is one turn read directly. Several are read by
a task each; the pieces come as they come, each with the number of its choice.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from app import report
from app.errors import InvalidRequest
from kvstore.errors import ContextTooLong

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from app.turns import Piece, Turn


class Exchange:
    """The turns of a request, the first of which stands for it; whoever gets one must close it."""

    def __init__(self, turns: Sequence[Turn], prompt_field: str = "messages") -> None:
        assert turns
        self._prompt_field = prompt_field
        self.turns = tuple(turns)
        self._unfinished = len(turns)
        self._readers: list[asyncio.Task[None]] = []

    @property
    def session_id(self) -> str:
        """The id the request runs under, given or made."""
        return self.turns[0].session_id

    @property
    def is_dismissed(self) -> bool:
        """It is the server that ends it."""
        return self.turns[0].is_dismissed

    @property
    def is_over(self) -> bool:
        """The last finish reason has been yielded."""
        return self._unfinished == 0

    async def pieces(self) -> AsyncIterator[Piece]:
        """What the turns produce, up to the last one's finish reason; raises what any of them raises.

        Raises:
            InvalidRequest: a prompt can never fit; names the field that holds it.
        """
        source = self.turns[0].pieces() if len(self.turns) == 1 else self._merged()
        try:
            async for piece in source:
                if piece.finish_reason is not None:
                    self._unfinished -= 1
                yield piece
        except ContextTooLong as refusal:
            raise InvalidRequest(str(refusal), self._prompt_field, "context_length_exceeded") from refusal

    async def _merged(self) -> AsyncIterator[Piece]:
        # Bounded: a slow client slows the readers, whose leases then merge what they have not read.
        arrived: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(len(self.turns))
        self._readers = [asyncio.create_task(_read(turn, arrived)) for turn in self.turns]
        reading = len(self._readers)
        while reading:
            piece = await arrived.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                reading -= 1
            else:
                yield piece

    def dismiss(self) -> None:
        """Note that it is the server that ends this."""
        for turn in self.turns:
            turn.dismiss()

    async def close(self) -> None:
        """Give everything back; returns when every slot is. Idempotent; the caller shields it."""
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)
        for turn in self.turns:
            await turn.close()
        leader = self.turns[0]
        for turn in self.turns:
            if turn.has_own_prompt:
                leader = turn
            else:
                leader.clear_up_after(turn)
                turn.left = None

    # --- what is told of it -----------------------------------------------------------------

    def session_as_granted(self) -> dict[str, object]:
        """`session` as far as the first grant knows it."""
        return report.session_as_granted(self.turns[0].standing, self.turns[0].figures)

    def session(self) -> dict[str, object]:
        """The whole `session` object."""
        return report.session(self.turns[0].standing, self.turns[0].figures)

    def usage(self, reasoning_tokens: int = 0) -> dict[str, object]:
        """OpenAI's `usage`, over all turns."""
        first, *others = self.turns
        counted = [report.Counted(turn.standing, turn.figures, turn.has_own_prompt) for turn in others]
        return report.usage(first.standing, first.figures, counted, reasoning_tokens)

    def timings(self) -> dict[str, object]:
        """llama-server's `timings`, of the first turn."""
        return report.timings(self.turns[0].standing, self.turns[0].figures)


async def _read(turn: Turn, arrived: asyncio.Queue[Piece | BaseException | None]) -> None:
    try:
        async for piece in turn.pieces():
            await arrived.put(piece)
    except Exception as error:  # a task of ours: its error is raised by whoever reads the queue
        await arrived.put(error)
    else:
        await arrived.put(None)
