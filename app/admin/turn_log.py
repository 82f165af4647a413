"""The last turns: of all sessions, and of each one for as long as it is remembered.

A session's turns hang on the session itself and go when it goes, so that nothing of what was deleted or has expired is
kept here. There are at most MOST_KEPT in all; the oldest go first.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from app.report import by_tier, milliseconds, reuse, woke_from

if TYPE_CHECKING:
    from app.report import Figures, Standing
    from kvstore.session import Session

MOST_KEPT = 20_000
"""Notes of some 500 bytes each."""
SHOWN = 20


@dataclass(frozen=True, slots=True)
class TurnNote:
    """One turn that has ended; never text. `at` is when, Unix seconds."""

    at: float
    session: str
    number: int
    """Of its session, where /admin knows it by; -1 for a further choice, which no session has."""
    branch: int
    turn: int
    outcome: str
    client: str
    prompt_tokens: int
    output_tokens: int
    reused: dict[str, int]
    computed: int
    recomputed: int
    woke_from: str | None
    wake_trigger: str | None
    wake_ms: float
    queue_ms: float
    first_token_ms: float | None
    total_ms: float
    miss: str | None
    diverged_at: int | None


@dataclass(frozen=True, slots=True)
class Text:
    """Where a prompt left its history: up to 80 characters of both."""

    message_index: int
    stored: str
    received: str


def turn_note(
    outcome: str, standing: Standing, figures: Figures, *, at: float, seconds: float, number: int
) -> TurnNote:
    """What became of a turn."""
    known, first = reuse(standing, figures), figures.first_token_at
    return TurnNote(
        at=round(at, 3),
        session=standing.session_id,
        number=number,
        branch=standing.branch,
        turn=standing.turn,
        outcome=outcome,
        client=standing.client,
        prompt_tokens=standing.prompt_tokens,
        output_tokens=figures.output_tokens,
        reused=by_tier(figures.reused),
        computed=known.computed if figures.ran else 0,
        recomputed=known.recomputed if figures.ran else 0,
        woke_from=woke_from(figures.reused),
        wake_trigger=figures.wake_trigger,
        wake_ms=milliseconds(figures.wake_seconds),
        queue_ms=milliseconds(figures.queue_seconds),
        first_token_ms=None if first is None else milliseconds(first),
        total_ms=milliseconds(seconds),
        miss=known.miss_reason if figures.ran else None,
        diverged_at=known.diverged_at if figures.ran else None,
    )


class TurnLog:
    """See the module."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._last: deque[TurnNote] = deque(maxlen=SHOWN)
        self._by_session: WeakKeyDictionary[Session, deque[tuple[TurnNote, Text | None]]] = WeakKeyDictionary()
        self._order: deque[weakref.ref[Session]] = deque()

    def note(self, note: TurnNote, session: Session | None, text: Text | None = None) -> None:
        """Keep `note`; with its `text` where that may be shown."""
        self._last.appendleft(note)
        if session is None or session.is_forgotten:
            return
        self._by_session.setdefault(session, deque()).append((note, text))
        self._order.append(weakref.ref(session))
        if len(self._order) > self._most:
            # Each session's own are in order, so the oldest of all is the oldest of its session.
            oldest = self._order.popleft()()
            if oldest is not None:
                self._by_session[oldest].popleft()

    def last(self) -> list[dict[str, object]]:
        """Of all sessions, the newest first."""
        return [asdict(note) for note in self._last]

    def of(self, session: Session, limit: int = 50) -> list[dict[str, object]]:
        """The newest of one session first, with what may be shown of where it diverged."""
        kept = list(self._by_session.get(session, ()))[-limit:]
        return [{**asdict(note), "diverged": asdict(text) if text else None} for note, text in reversed(kept)]
