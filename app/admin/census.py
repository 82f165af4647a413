"""How many sessions are kept in which tier: counted some at a time, since there may be a hundred thousand.

A session counts for the fastest tier that has the end of its latest branch, and its tokens with it. What is told is the
last count that was whole; with few sessions that is one of this moment.
"""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from app.admin.counting import TIERS

if TYPE_CHECKING:
    from app.store import SleepingStore
    from kvstore.session import Session
    from kvstore.sessions import SessionBook

AT_ONCE = 200
"""Sessions between two breaths: each is a look at one block in each tier."""


@dataclass(slots=True)
class Count:
    """Sessions by tier; `nowhere` have a history and no K/V. `tokens` are of those that have some."""

    sessions: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*TIERS, "nowhere"), 0))
    tokens: int = 0

    @property
    def kept(self) -> int:
        return sum(self.sessions[tier] for tier in TIERS)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "kept": self.kept}


class Census:
    """See the module."""

    def __init__(self, book: SessionBook, store: SleepingStore) -> None:
        self._book = book
        self._store = store
        self._left: list[weakref.ref[Session]] = []
        self._running = Count()
        self._whole: Count | None = None

    @property
    def last(self) -> Count:
        """The last count that was whole; the first one as far as it has got."""
        return self._running if self._whole is None else self._whole

    def advance(self, most: int = AT_ONCE) -> None:
        """Look at `most` more; once all were seen, begin again."""
        if not self._left:
            self._running = Count()
            # Weakly: what is deleted meanwhile must not live on here.
            self._left = [weakref.ref(session) for session in self._book.recent(0, len(self._book))]
        for _ in range(min(most, len(self._left))):
            session = self._left.pop()()
            if session is not None and not session.is_forgotten:
                self._look_at(session)
        if not self._left:
            self._whole = self._running

    def _look_at(self, session: Session) -> None:
        branch = session.latest
        if branch is None or branch.tip is None:
            return
        found = self._store.blocks_by_tier((branch.tip,))
        fastest = min((tier for tier, count in found.items() if count), default=None)
        self._running.sessions["nowhere" if fastest is None else fastest.name.lower()] += 1
        if fastest is not None:
            self._running.tokens += branch.num_tokens
