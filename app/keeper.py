"""Keeps the book of sessions, the store of their K/V and the journal that outlives both in step.

The book knows who said what, the store which blocks are where; neither knows the other. Whatever is recorded,
changed, forked, forgotten or expired goes through here, so that store and journal are told in the same breath:

    a turn completed       its branch moved from the old tip to the new one; what only the old tail had goes first
    a turn did not         what it wrote beyond its branch goes first, and with the branch when that is closed
    nothing may stay       (persist none, a session deleted meanwhile) what the turn wrote is closed at once
    a branch is gone       its tip is closed: bytes that nobody else shares leave every tier

Everything runs on the event loop, without an await between the book's step and the store's. Expiry is kept by a
timer, and looked at again before a session is met: a busy loop must not show what has expired.

What an earlier process left is taken in by `restore`, histories excepted: `recall` reads those of a session before
a turn looks at them, on another thread.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore import chain
from kvstore.catalog_reading import ReadFault, no_garbage_collection
from kvstore.events import BranchRecorded
from kvstore.former import Gone
from kvstore.history import History, Unread
from kvstore.session_journal import NullSessionJournal
from kvstore.terms import SILENT, Change, Persist, Wishes

if TYPE_CHECKING:
    from app.store import SleepingStore
    from kvstore.catalog import Restored
    from kvstore.reuse import MissReason
    from kvstore.session import Branch, OpenTurn, Session
    from kvstore.session_journal import SessionJournal
    from kvstore.sessions import SessionBook
    from kvstore.types import BlockKey, Namespace

LONGEST_TIMER_SECONDS = 3600.0
"""Event loops differ in how far they can look ahead; the timer then looks again."""

FORGOTTEN_AT_ONCE = 500
"""Sessions dropped between two breaths of the event loop."""

SETTLE_SECONDS = 5.0
"""A commit takes milliseconds; a disk that is away keeps nobody waiting for longer."""

ON_DISK_STILL = (Gone.OTHER_MODEL, Gone.LOST, Gone.CORRUPT)
GONE_BY_FAULT = {ReadFault.LOST: Gone.LOST, ReadFault.CORRUPT: Gone.CORRUPT}


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

    def __init__(
        self,
        book: SessionBook,
        store: SleepingStore,
        clock: Callable[[], float] = time.monotonic,
        journal: SessionJournal | None = None,
    ) -> None:
        self.book = book
        self.unreadable: Counter[ReadFault] = Counter()
        """Histories that could not be recalled, by why."""
        self.lost: MissReason | None = None
        """Why sessions of an earlier process may be missing, all of them; None where none are."""
        self._store = store
        self._clock = clock
        self._journal = journal or NullSessionJournal()
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
        digests: Sequence[bytes] = (),
    ) -> OpenTurn:
        """As SessionBook's; what had to make room is gone from the store, too."""
        now = self._clock()
        turn = self.book.begin(
            scope, session_id, token_ids, now, parent_id=parent_id, group=group, wishes=wishes, digests=digests
        )
        self._close(turn.forgotten)
        return turn

    async def recall(self, scope: str, session_id: str) -> None:
        """Read the session's histories that lie on disk, so that a turn can look at them.

        One that cannot be had any more goes with its branch; one that cannot be read now stays, passed over.
        """
        for branch in self.book.unread(scope, session_id):
            session, unread = self.book.get(scope, session_id), branch.history
            if session is None or not isinstance(unread, Unread):
                continue  # it went, or somebody else recalled it, while the one before was read
            found = await self._journal.read(unread)
            if isinstance(found, History):
                self.book.recall(session, branch, found)
                continue
            self.unreadable[found] += 1
            if found is not ReadFault.UNREADABLE and branch.history is unread:
                self._lose(session, branch, GONE_BY_FAULT[found])

    def record(self, turn: OpenTurn, history: History, blocks: Written) -> None:
        """Close a turn that completed."""
        recorded = self.book.record(turn, history, self._clock(), chain.pack(blocks.keys[: blocks.own]))
        if not recorded.is_known:
            self._drop(blocks.keys)
            return
        self._journal.keep(turn.session, [turn.branch])
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
        if branch.turns and not session.is_forgotten:
            self._journal.keep(session, [branch])  # it was active, which puts its expiry off
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
        self._journal.keep(session, session.branches.values())
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
        self._journal.keep(fork, fork.branches.values())
        self._close(forgotten)
        self._set_timer()
        return fork

    def forget(self, scope: str, session_id: str) -> bool:
        """Drop a session, whichever model's it is; a turn of it in flight runs on and leaves nothing.

        False where nobody knows it.
        """
        former = self.book.former(scope, session_id)
        session = self.book.forget(scope, session_id)
        if session is not None:
            self._close((session, branch) for branch in session.branches.values())
        elif former is None or former.why not in ON_DISK_STILL:
            return False
        else:
            self.book.forget_former(scope, session_id)
        self._journal.drop_ids(scope, session_id)
        return True

    def forget_everywhere(self, session_id: str, scopes: Iterable[str]) -> None:
        """Drop the sessions of that id, whosever they are; `scopes` are those that have any on disk."""
        for scope in {*self.book.tenants(), *scopes}:
            if not self.forget(scope, session_id):
                self._journal.drop_ids(scope, session_id)

    async def forget_all_everywhere(self, scopes: Iterable[str]) -> None:
        """Drop every session; `scopes` are those that have any on disk."""
        for scope in {*self.book.tenants(), *scopes}:
            await self.forget_all(scope)

    async def settled(self, seconds: float = SETTLE_SECONDS) -> bool:
        """Wait until the disk has what was told so far; False where it does not answer in time.

        A client that was told of a deletion may believe that the session does not come back.
        """
        return await self._journal.flush(seconds)

    async def forget_all(self, scope: str) -> int:
        """Drop the sessions that are there now, some at a time: a hundred thousand would stop every stream.

        Other models' go with them, uncounted.
        """
        self._journal.drop_ids(scope, None)
        end, count = self.book.end_serial, 0
        while gone := self.book.forget_all(scope, before=end, limit=FORGOTTEN_AT_ONCE):
            self._close((session, branch) for session in gone for branch in session.branches.values())
            count += len(gone)
            await asyncio.sleep(0)
        return count

    # --- an earlier process, and its files ----------------------------------------------------

    def restore(self, restored: Restored) -> None:
        """Take in what an earlier process left, before any turn."""
        with no_garbage_collection():
            forgotten = self.book.restore(restored.sessions, restored.others, restored.next_serial)
            sessions = self.book.recent(0, len(self.book))
            branches = (branch for session in sessions for branch in session.branches.values())
            self._store.take_over_branches([_event(branch, None) for branch in branches if branch.keys])
        self._journal.drop(forgotten)
        self._set_timer()

    async def tell_all(self) -> None:
        """The journal had to begin a new file: tell it of every session again, some at a time."""
        sessions = self.book.recent(0, len(self.book))
        for start in range(0, len(sessions), FORGOTTEN_AT_ONCE):
            for session in sessions[start : start + FORGOTTEN_AT_ONCE]:
                if not session.is_forgotten:
                    self._journal.keep(session, session.branches.values())
            await asyncio.sleep(0)

    def _lose(self, session: Session, branch: Branch, why: Gone) -> None:
        """Out of the book and the store; in the file it stays, for whoever may mend it."""
        if self.book.lose(session, branch, why) and branch.tip is not None:
            self._store.forget((branch.tip,), (branch.block_keys,))

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
        event = _event(branch, old_tip, superseded, is_final)
        if event.tip is not None or event.old_tip is not None or superseded:
            self._store.record_branch(event)

    def _close(self, gone: Iterable[tuple[Session, Branch]]) -> None:
        gone = tuple(gone)
        self._journal.drop(gone)
        stored = [branch for _, branch in gone if branch.tip is not None]
        if stored:
            tips = tuple(branch.block_keys[-1] for branch in stored)
            self._store.forget(tips, tuple(branch.block_keys for branch in stored))

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        """Close a chain that is no branch's. It is made one first: the store counts the branches of a tip, and
        another session may have the same."""
        if keys:
            self._store.record_branch(BranchRecorded(keys[-1], to_nvme=False))
            self._store.forget((keys[-1],), (tuple(keys),))


def _event(
    branch: Branch, old_tip: BlockKey | None, superseded: tuple[BlockKey, ...] = (), is_final: bool = False
) -> BranchRecorded:
    terms = branch.terms
    return BranchRecorded(
        branch.tip,
        old_tip,
        superseded,
        terms.keep_seconds,
        terms.pinned,
        is_final,
        to_nvme=terms.persist is Persist.DISK,
    )
