"""What is told of sessions to whoever makes them outlive the process.

Of a branch on the terms `persist: memory` or `none` nothing is written, not even that it is there; one that had
been written before goes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from kvstore.catalog_reading import ReadFault
from kvstore.catalog_rows import BranchRow, SessionRow
from kvstore.clocks import Clocks
from kvstore.terms import Persist
from kvstore.workers import Workers

if TYPE_CHECKING:
    from kvstore.catalog import Catalog
    from kvstore.catalog_pending import Pending
    from kvstore.history import History, Unread
    from kvstore.session import Branch, Session

READ_SECONDS = 2.0
"""A history is read in a millisecond; a turn does not wait for a disk that hangs."""


class SessionJournal(Protocol):
    """Called on the event loop; returns at once and never raises for what a disk does."""

    def keep(self, session: Session, branches: Iterable[Branch]) -> None:
        """The session and these branches of it are as they are now."""

    def drop(self, gone: Iterable[tuple[Session, Branch]]) -> None:
        """These branches are gone."""

    def drop_ids(self, tenant: str, session_id: str | None) -> None:
        """A client deleted the session, or all of a tenant's: whatever the files have under that id goes, also what
        another model has, and what could no longer be read."""

    async def read(self, unread: Unread) -> History | ReadFault:
        """A history that was kept by an earlier process."""

    async def flush(self, seconds: float) -> bool:
        """Wait until what was told so far is on the disk, and what was dropped is not; False if that took longer."""


class NullSessionJournal:
    """Nothing outlives the process."""

    def keep(self, session: Session, branches: Iterable[Branch]) -> None: ...

    def drop(self, gone: Iterable[tuple[Session, Branch]]) -> None: ...

    def drop_ids(self, tenant: str, session_id: str | None) -> None: ...

    async def read(self, unread: Unread) -> History | ReadFault:
        return ReadFault.LOST

    async def flush(self, seconds: float) -> bool:
        return True


class CatalogJournal:
    """Into the catalog, in its time."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._wall = wall
        self._readers = Workers("catalog-read", 1)

    def keep(self, session: Session, branches: Iterable[Branch]) -> None:
        clocks = Clocks(self._clock(), self._wall())
        told = [branch for branch in branches if branch.turns]
        kept = [branch_row(session, branch, clocks) for branch in told if _is_kept(branch)]
        dropped = [branch.index for branch in told if not _is_kept(branch)]
        row = session_row(session, clocks) if _has_kept(session) else None

        def change(pending: Pending) -> None:
            for index in dropped:
                pending.drop_branch(session.serial, index)
            if row is None:
                pending.drop_session(session.serial)
                return
            pending.keep_session(row)
            for branch in kept:
                pending.keep_branch(branch)

        if kept or dropped:
            self._catalog.put(change)

    def drop(self, gone: Iterable[tuple[Session, Branch]]) -> None:
        clocks = Clocks(self._clock(), self._wall())
        pairs = tuple(gone)
        left = set(pairs)
        rows: dict[int, SessionRow | None] = {}
        for session in {session for session, _ in pairs}:
            stays = not session.is_forgotten and _has_kept(session, left)
            rows[session.serial] = session_row(session, clocks) if stays else None

        def change(pending: Pending) -> None:
            for session, branch in pairs:
                pending.drop_branch(session.serial, branch.index)
            for serial, row in rows.items():
                if row is None:
                    pending.drop_session(serial)
                else:
                    pending.keep_session(row)

        if pairs:
            self._catalog.put(change)

    def drop_ids(self, tenant: str, session_id: str | None) -> None:
        self._catalog.put(lambda pending: pending.drop_ids(tenant, session_id))

    async def read(self, unread: Unread) -> History | ReadFault:
        """On a thread of its own; a disk that takes too long is one that cannot be read now."""
        reading = asyncio.get_running_loop().run_in_executor(
            self._readers.place(urgent=False), self._catalog.read, unread
        )
        try:
            return await asyncio.wait_for(reading, READ_SECONDS)
        except TimeoutError:
            return ReadFault.UNREADABLE

    async def flush(self, seconds: float) -> bool:
        return await asyncio.to_thread(self._catalog.wait, seconds)

    def close(self) -> None:
        """Nothing more is read."""
        self._readers.close()


def session_row(session: Session, clocks: Clocks) -> SessionRow:
    """The session in the wall clock's time."""
    return SessionRow(
        serial=session.serial,
        tenant=session.tenant,
        id=session.id,
        parent_id=session.parent_id,
        group=session.group,
        created=clocks.unix(session.created),
        last_active=clocks.unix(session.last_active),
        turns=session.turns,
        next_branch=session.next_branch,
        terms=session.terms,
    )


def branch_row(session: Session, branch: Branch, clocks: Clocks) -> BranchRow:
    """The branch in the wall clock's time."""
    return BranchRow(
        serial=session.serial,
        branch=branch.index,
        last_active=clocks.unix(branch.last_active),
        expected_return=None if branch.expected_return is None else clocks.unix(branch.expected_return),
        turns=branch.turns,
        terms=branch.terms,
        keys=branch.keys,
        history=branch.history,
    )


def _is_kept(branch: Branch) -> bool:
    return branch.turns > 0 and branch.terms.persist is Persist.DISK


def _has_kept(session: Session, without: Iterable[tuple[Session, Branch]] = ()) -> bool:
    return any(_is_kept(branch) and (session, branch) not in without for branch in session.branches.values())
