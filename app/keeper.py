"""Keeps the book of sessions and the store of their K/V in step.

The book knows who said what, the store which blocks are where; neither knows the other. Whatever is recorded,
changed, forked, forgotten or expired goes through here, so that the store is told in the same breath:

    a turn completed       its branch moved from the old tip to the new one; what only the old tail had goes first
    a turn did not         what it wrote beyond its branch goes first, and with the branch when that is closed
    nothing may stay       (persist none, a session deleted meanwhile) what the turn wrote is closed at once
    a branch is gone       its tip is closed: bytes that nobody else shares leave every tier

Everything runs on the event loop, without an await between the book's step and the store's. Expiry is kept by a
timer, and looked at again before a session is met: a busy loop must not show what has expired.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore import chain
from kvstore.events import BranchRecorded
from kvstore.terms import SILENT, Change, Persist, Wishes

if TYPE_CHECKING:
    from app.store import SleepingStore
    from kvstore.history import History
    from kvstore.session import Branch, OpenTurn, Session
    from kvstore.sessions import SessionBook
    from kvstore.types import BlockKey, Namespace

LONGEST_TIMER_SECONDS = 3600.0
"""Event loops differ in how far they can look ahead; the timer then looks again."""

FORGOTTEN_AT_ONCE = 500
"""Sessions dropped between two breaths of the event loop."""


@dataclass(frozen=True, slots=True)
class Written:
    """Keys of the blocks that hold a turn's prompt and output: [0, `own`) its history's, the rest beyond its end.

    A stop string cuts ids off whose blocks were written all the same.
    """

    keys: tuple[BlockKey, ...]
    own: int = 0

    @property
    def beyond(self) -> tuple[BlockKey, ...]:
        return self.keys[self.own :]


def written(
    token_ids: array[int], block_tokens: int, space: Namespace, *, computed_tokens: int, history_tokens: int = 0
) -> Written:
    """Of a turn whose prompt and output are `token_ids`: K/V are there for the first `computed_tokens`, whole blocks.

    Of its history of `history_tokens` the last has none: it was sampled and never computed.
    """
    own_tokens = max(0, history_tokens - 1)
    end = min(len(token_ids), max(computed_tokens, own_tokens))
    keys = chain.extend(None, token_ids[:end], block_tokens, space)
    return Written(tuple(keys), own_tokens // block_tokens)


class Keeper:
    """See the module."""

    def __init__(self, book: SessionBook, store: SleepingStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.book = book
        self._store = store
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    # --- turns ------------------------------------------------------------------------------

    def begin(
        self,
        scope: str,
        session_id: str,
        token_ids: array[int],
        *,
        parent_id: str | None = None,
        group: str | None = None,
        wishes: Wishes = SILENT,
    ) -> OpenTurn:
        """As SessionBook's; what had to make room is gone from the store, too."""
        turn = self.book.begin(
            scope, session_id, token_ids, self._clock(), parent_id=parent_id, group=group, wishes=wishes
        )
        self._close(turn.forgotten)
        return turn

    def record(self, turn: OpenTurn, history: History, blocks: Written) -> None:
        """Close a turn that completed."""
        recorded = self.book.record(turn, history, self._clock(), chain.pack(blocks.keys[: blocks.own]))
        if not recorded.is_known:
            self._drop(blocks.keys)
            return
        tails = [tail for tail in (recorded.superseded, blocks.beyond) if tail]
        self._tell(turn.branch, recorded.old_tip, tails[0] if tails else (), is_final=turn.wishes.final)
        for tail in tails[1:]:
            self._tell(turn.branch, turn.branch.tip, tail, is_final=turn.wishes.final)
        if recorded.tip is None:
            self._drop(blocks.beyond)
        self._close(self.book.trim(turn.session))
        self._set_timer()

    def abandon(self, turn: OpenTurn, blocks: Written | None = None) -> None:
        """Close a turn that did not complete, or of which nothing may stay; `blocks` None: it never ran."""
        keys = () if blocks is None else blocks.keys
        branch, session = turn.branch, turn.session
        if turn.terms.persist is Persist.NONE and blocks is not None:
            if not session.is_forgotten:
                self._close([(session, branch)])
            self.book.discard(turn)
            self._drop(keys)
            return
        self.book.abandon(turn)
        if session.is_forgotten and branch.turns:
            self._drop(keys)  # deleted while it ran
        elif branch.tip is not None:
            self._tell(branch, branch.tip, chain.beyond(chain.pack(keys), branch.keys))
        elif turn.terms.expire_seconds is not None:
            self._drop(keys)  # no branch will ever expire for it
        self._close(self.book.trim(turn.session))
        self._set_timer()

    def beside(self, turn: OpenTurn, blocks: Written) -> None:
        """Another answer to the same prompt, which no branch keeps: what it wrote beyond `turn`'s goes first.

        `turn` has been closed. Where it left no branch, nothing stays.
        """
        branch, session = turn.branch, turn.session
        if branch.tip is None or session.is_forgotten or session.branches.get(branch.index) is not branch:
            self._drop(blocks.keys)
            return
        self._tell(branch, branch.tip, chain.beyond(chain.pack(blocks.keys), branch.keys))

    # --- sessions ---------------------------------------------------------------------------

    def change(self, scope: str, session_id: str, change: Change) -> Session:
        """Change a session's terms.

        Raises:
            SessionUnknown: it is not there.
        """
        session = self.book.change(scope, session_id, change)
        for branch in session.branches.values():
            if not branch.is_busy and branch.tip is not None:  # a busy one is told when its turn ends
                self._tell(branch, branch.tip)
        self._set_timer()
        return session

    def fork(self, scope: str, session_id: str, new_id: str, branch: int | None) -> Session:
        """A new session that goes on from the same histories.

        Raises:
            SessionUnknown, SessionTaken, SessionEmpty: as SessionBook.fork.
        """
        fork, forgotten = self.book.fork(scope, session_id, new_id, self._clock(), branch=branch)
        for own in fork.branches.values():
            self._tell(own, None)  # before anything is closed: it shares blocks, perhaps with what goes
        self._close(forgotten)
        self._set_timer()
        return fork

    def forget(self, scope: str, session_id: str) -> Session | None:
        """Drop a session; a turn of it in flight runs on and leaves nothing."""
        session = self.book.forget(scope, session_id)
        if session is not None:
            self._close((session, branch) for branch in session.branches.values())
        return session

    async def forget_all(self, scope: str) -> int:
        """Drop the sessions that are there now, some at a time: a hundred thousand would stop every stream."""
        end, count = self.book.end_serial, 0
        while gone := self.book.forget_all(scope, before=end, limit=FORGOTTEN_AT_ONCE):
            self._close((session, branch) for session in gone for branch in session.branches.values())
            count += len(gone)
            await asyncio.sleep(0)
        return count

    # --- expiry -----------------------------------------------------------------------------

    def expire(self) -> None:
        """Let go of what has expired."""
        self._close(self.book.expire(self._clock()))

    def close(self) -> None:
        """No timer from now on; what would expire later goes with the process."""
        self._is_closed = True
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.book.next_expiry()
        if due is not None and not self._is_closed:
            delay = min(max(0.0, due - self._clock()), LONGEST_TIMER_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        self._set_timer()

    # --- the store's side -------------------------------------------------------------------

    def _tell(
        self, branch: Branch, old_tip: BlockKey | None, superseded: tuple[BlockKey, ...] = (), is_final: bool = False
    ) -> None:
        terms = branch.terms
        event = BranchRecorded(branch.tip, old_tip, superseded, terms.keep_seconds, terms.pinned, is_final)
        if event.tip is not None or event.old_tip is not None or superseded:
            self._store.record_branch(event)

    def _close(self, gone: Iterable[tuple[Session, Branch]]) -> None:
        tips = tuple(branch.tip for _, branch in gone if branch.tip is not None)
        if tips:
            self._store.forget(tips)

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        """Close a chain that is no branch's. It is made one first: the store counts the branches of a tip, and
        another session may have the same."""
        if keys:
            self._store.record_branch(BranchRecorded(keys[-1]))
            self._store.forget((keys[-1],))
