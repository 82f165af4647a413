"""Conversations that were begun by `POST /v1/conversations` and of which no turn has completed yet.

From its first turn on a conversation is a session of its id, and lasts as one. One that nobody has used is not worth
writing down: after a restart it is unknown.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

MOST = 10_000


class Conversations:
    """Not thread-safe: the event loop owns it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._begun: OrderedDict[tuple[str, str], None] = OrderedDict()

    def begin(self, scope: str) -> str:
        """A new one's id; beyond `most` the oldest is forgotten."""
        conversation_id = f"conv_{secrets.token_hex(24)}"
        self._begun[scope, conversation_id] = None
        if len(self._begun) > self._most:
            self._begun.popitem(last=False)
        return conversation_id

    def has(self, scope: str, conversation_id: str) -> bool:
        """It was begun here, and nobody forgot it."""
        return (scope, conversation_id) in self._begun

    def forget(self, scope: str, conversation_id: str) -> bool:
        """False where it is not known."""
        if not self.has(scope, conversation_id):
            return False
        del self._begun[scope, conversation_id]
        return True
