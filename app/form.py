"""What a dialect is to an answer: how pieces become bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from app import sse

if TYPE_CHECKING:
    from app.errors import ErrorReply
    from app.exchange import Exchange
    from app.turns import Piece


class Form(Protocol):
    """Writes one answer, whole or streamed; remembers of it what its last bytes need."""

    keep_alive: bytes = sse.KEEP_ALIVE
    """Sent when a stream has been silent for long."""

    def failure(self, reply: ErrorReply) -> bytes:
        """The last bytes of a stream that fails after it began."""
        return sse.failure(reply)

    def chunk(self, piece: Piece, exchange: Exchange) -> bytes:
        """What a piece adds to a stream; empty where it adds nothing yet."""

    def ending(self, exchange: Exchange) -> bytes:
        """The end of a stream that came to its end."""

    def take(self, piece: Piece, exchange: Exchange) -> None:
        """Remember a piece of an answer that is sent whole."""

    def whole(self, exchange: Exchange) -> dict[str, object]:
        """The answer that the pieces taken make."""
