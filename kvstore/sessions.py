"""Sessions and their branches: who said what, in exact tokens (pure).

The rules:

1. One id carries one or more conversations, each a branch. A turn continues the branch with which
   it shares the longest token prefix, if that reaches the branch's first answer; else it begins
   a new branch. Regenerating the first answer shares the whole first prompt, and so continues.
2. A branch with a turn in flight is busy and not continued by another: turns on one id run at
   once, each on its own branch, and nothing conflicts.
3. A branch changes only when a turn of it completes. A turn that failed or was cancelled leaves
   no trace; a new branch or session that only it wanted goes with it.
4. At most `max_branches` a session and `max_sessions` in all: the least recently active idle ones
   are forgotten first, when another begins and when a turn has ended. What is busy is never forgotten
   to make room, nor is the session whose turn has just ended.
5. A branch whose terms say so expires that long after its last activity; while a turn of it is in
   flight it is active. Its session goes with the last of its branches.
6. A fork is a session of its own that begins with the same histories. Sharing is by reference here
   and by block key in the store, so neither copies anything.
7. Whoever makes the book forget something tells the store: what goes beside the turn at hand is returned.
8. A session that was read back after a restart is complete but for its histories, which are `Unread` until
   somebody recalls them. Such a branch is listed, found by its text, forked, changed, expired and forgotten
   like any other; only a turn cannot continue it, so it is recalled before a turn looks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from kvstore import chain
from kvstore.deadlines import Deadlines
from kvstore.errors import SessionEmpty, SessionTaken, SessionUnknown
from kvstore.former import Former, FormerSessions, Gone
from kvstore.history import History, Unread
from kvstore.session import Branch, Match, OpenTurn, Page, Recorded, Session
from kvstore.terms import SILENT, Change, Wishes
from kvstore.text_index import TextIndex


class SessionBook:
    """All sessions that are remembered, by tenant and id. Not thread-safe: the event loop owns it."""

    def __init__(self, *, max_sessions: int = 100_000, max_branches: int = 16) -> None:
        assert max_sessions > 0
        assert max_branches > 0
        self.max_sessions = max_sessions
        self.max_branches = max_branches
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()  # least recently active first
        self._by_serial: dict[str, dict[int, Session]] = {}
        self._texts = TextIndex()
        self._former = FormerSessions(max_sessions)
        self._expiries: Deadlines[tuple[Session, Branch]] = Deadlines()
        self._next_serial = 0
        self.num_branches = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __repr__(self) -> str:
        branches = sum(len(session.branches) for session in self._sessions.values())
        busy = sum(branch.is_busy for session in self._sessions.values() for branch in session.branches.values())
        return f"<SessionBook {len(self)}/{self.max_sessions} sessions | {branches} branches, {busy} busy>"

    # --- looking ----------------------------------------------------------------------------

    def get(self, tenant: str, session_id: str) -> Session | None:
        """The session, if it is known."""
        return self._sessions.get((tenant, session_id))

    def histories(self, tenant: str, session_id: str) -> list[History]:
        """What a prompt of this session may be spliced from, busy branches included, most recent first."""
        session = self.get(tenant, session_id)
        if session is None:
            return []
        branches = sorted(session.branches.values(), key=lambda branch: branch.last_active, reverse=True)
        return [branch.history for branch in branches if branch.turns and isinstance(branch.history, History)]

    def unread(self, tenant: str, session_id: str) -> list[Branch]:
        """Branches of the session whose histories have not been recalled."""
        session = self.get(tenant, session_id)
        branches = session.branches.values() if session is not None else ()
        return [branch for branch in branches if isinstance(branch.history, Unread)]

    def match(self, tenant: str, session_id: str, token_ids: array[int], digests: Sequence[bytes] = ()) -> Match:
        """Which branch of the session a prompt of `token_ids` continues; changes nothing.

        `digests` are those of its messages: what tells the whole of a branch goes on with it, also where its template
        has moved something into another place (tools before the newest question, say) and no answer's tokens agree.
        """
        session = self.get(tenant, session_id)
        best: Match | None = None
        has_unread = False
        for branch in _idle(session) if session is not None else ():
            history = branch.history
            if isinstance(history, Unread):
                has_unread = True
                continue
            shared = chain.common_prefix(history.token_ids, token_ids)
            goes_on = shared >= max(1, history.first_answer) or bool(history.digests and history.digests[-1] in digests)
            if goes_on and (best is None or _beats(branch, shared, best)):
                best = Match(branch, shared, history.num_tokens, True)
        return best if best is not None else Match(None, 0, 0, session is not None, has_unread)

    def find(
        self, tenant: str, digests: Sequence[bytes], *, parent_id: str | None = None, group: str | None = None
    ) -> Session | None:
        """The session with an idle branch that has the longest of these ascending prefixes of a text.

        Among equals the parent's own branches come first, then those of the same group, then the latest.
        """
        return self._texts.find(tenant, digests, parent_id=parent_id, group=group)

    def holders(self, tenant: str, digest: bytes) -> list[tuple[Session, Branch]]:
        """The branches, idle or busy, whose histories have this digest of a text or of a reply's id.

        Forks share them; the one they were made from comes first.
        """
        return self._texts.holders(tenant, digest)

    def former(self, tenant: str, session_id: str) -> Former | None:
        """What became of a session that is no longer there; None: it never was, as far as is known."""
        return self._former.get(tenant, session_id)

    def serial(self, tenant: str, session_id: str) -> int | None:
        """Where an id stands, or stood, among its tenant's: what `page` goes on from."""
        known = self.get(tenant, session_id) or self.former(tenant, session_id)
        return None if known is None else known.serial

    def numbered(self, serial: int) -> Session | None:
        """The session of that serial, whosever it is."""
        return next((own[serial] for own in self._by_serial.values() if serial in own), None)

    def page(self, tenant: str, *, before: int | None = None, limit: int = 100) -> Page:
        """Up to `limit` of a tenant's sessions first seen before serial `before`, newest first."""
        found: list[Session] = []
        for serial, session in reversed(self._by_serial.get(tenant, {}).items()):
            if before is not None and serial >= before:
                continue
            if len(found) == limit:
                return Page(tuple(found), found[-1].serial)
            found.append(session)
        return Page(tuple(found), None)

    def tenants(self) -> list[str]:
        """Those that have sessions."""
        return list(self._by_serial)

    def recent(self, offset: int = 0, limit: int = 100) -> list[Session]:
        """Sessions of every tenant, the most recently active first."""
        return list(islice(reversed(self._sessions.values()), offset, offset + limit))

    # --- turns ------------------------------------------------------------------------------

    def begin(
        self,
        tenant: str,
        session_id: str,
        token_ids: array[int],
        now: float,
        *,
        parent_id: str | None = None,
        group: str | None = None,
        wishes: Wishes = SILENT,
        digests: Sequence[bytes] = (),
    ) -> OpenTurn:
        """Start a turn on the branch that `token_ids` continues, or on a new one; marks it busy. See `match`.

        Close it with `record`, `abandon` or `discard`, exactly once.
        """
        match = self.match(tenant, session_id, token_ids, digests)
        former = self.former(tenant, session_id)
        session = self.get(tenant, session_id) or self._add(tenant, session_id, now, parent_id, group)
        branch = match.branch or self._branch_out(session, now)
        branch.is_busy = True
        self._touch(session, branch, now)
        forgotten = (*self._trim_branches(session), *self._trim_sessions())
        terms = branch.terms.with_wishes(wishes)
        return OpenTurn(session, branch, match, branch.turns + 1, terms, wishes, former, forgotten)

    def record(self, turn: OpenTurn, history: History, now: float, keys: bytes = b"") -> Recorded:
        """Close a turn that completed: `history` replaces what its branch had, and `keys` its block keys, packed."""
        branch = self._close(turn)
        previous, old_keys, old_tip = branch.history, branch.keys, branch.tip
        if turn.session.is_forgotten:
            return Recorded(False, array("I"), 0)
        assert isinstance(previous, History), "a turn continues only what it could look at"
        self._texts.remove(turn.session, branch)
        branch.history, branch.keys, branch.written_blocks = history, keys, None
        # What was changed while the turn ran (PATCH) holds, where its request did not say otherwise.
        branch.terms = branch.terms.with_wishes(turn.wishes)
        idle = turn.wishes.expected_idle_seconds
        branch.expected_return = None if idle is None else now + idle
        branch.turns += 1
        turn.session.turns += 1
        self._texts.add(turn.session, branch)
        self._touch(turn.session, branch, now)
        self._set_expiry(turn.session, branch)
        return Recorded(
            is_known=True,
            previous_ids=previous.token_ids,
            kept_tokens=chain.common_prefix(previous.token_ids, history.token_ids),
            tip=branch.tip,
            old_tip=old_tip,
            superseded=chain.beyond(old_keys, keys),
        )

    def abandon(self, turn: OpenTurn) -> None:
        """Close a turn that did not complete (or must not be kept): its branch stays as it was."""
        branch, session = self._close(turn), turn.session
        if branch.turns == 0:
            self._remove(session, branch)
        elif not session.is_forgotten:
            self._set_expiry(session, branch)
        if not session.branches and not session.is_forgotten:
            self._drop(session)
            if turn.former is not None:
                self._former.add(session.tenant, session.id, turn.former)

    def discard(self, turn: OpenTurn) -> None:
        """Close a turn of which nothing may stay: its branch goes, too."""
        branch, session = self._close(turn), turn.session
        if not session.is_forgotten:
            self._drop_branch(session, branch, Gone.DELETED)

    def trim(self, kept: Session) -> tuple[tuple[Session, Branch], ...]:
        """Forget what is beyond the bounds now that a turn of `kept` has ended, which itself stays; says what."""
        branches = () if kept.is_forgotten else tuple(self._trim_branches(kept))
        return (*branches, *self._trim_sessions(keep=kept))

    # --- terms ------------------------------------------------------------------------------

    def change(self, tenant: str, session_id: str, change: Change) -> Session:
        """Change the terms of all branches of a session and of those to come.

        Raises:
            SessionUnknown: it is not there.
        """
        session = self._known(tenant, session_id)
        session.terms = change.applied_to(session.terms)
        for branch in session.branches.values():
            branch.terms = change.applied_to(branch.terms)
            self._set_expiry(session, branch)
        return session

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do."""
        return self._expiries.next()

    def expire(self, now: float) -> list[tuple[Session, Branch]]:
        """Drop the branches whose time has come, and sessions that have no other; says which."""
        gone = []
        for session, branch in self._expiries.take_due(now):
            if not branch.is_busy:  # a busy one is looked at again when its turn ends
                self._drop_branch(session, branch, Gone.EXPIRED)
                gone.append((session, branch))
        return gone

    # --- forks ------------------------------------------------------------------------------

    def fork(
        self, tenant: str, session_id: str, new_id: str, now: float, *, branch: int | None = None
    ) -> tuple[Session, tuple[tuple[Session, Branch], ...]]:
        """A new session with the histories of this one's branches, or of one; and what had to go to make room.

        A turn in flight has no part in it. Branches keep when they were last active: forking does not
        put off an expiry.

        Raises:
            SessionUnknown: it is not there, or has no such branch.
            SessionTaken: `new_id` is a session already.
            SessionEmpty: no turn of it has completed yet.
        """
        source = self._known(tenant, session_id)
        if branch is not None and branch not in source.branches:
            raise SessionUnknown(session_id, branch)
        if self.get(tenant, new_id) is not None:
            raise SessionTaken(new_id)
        told = [each for each in source.branches.values() if each.turns and branch in (None, each.index)]
        if not told:
            raise SessionEmpty(session_id)
        session = self._add(tenant, new_id, now, session_id, source.group)
        session.terms, session.next_branch = source.terms, source.next_branch
        session.turns, session.last_active = sum(each.turns for each in told), now
        for each in told:
            own = replace(each, is_busy=False)
            self._put(session, own)
            self._texts.add(session, own)
            self._set_expiry(session, own)
        return session, tuple(self._trim_sessions(keep=session))

    # --- forgetting -------------------------------------------------------------------------

    def forget(self, tenant: str, session_id: str) -> Session | None:
        """Drop a session with all its branches; turns in flight run on and are not recorded."""
        session = self.get(tenant, session_id)
        if session is not None:
            self._drop(session, Gone.DELETED)
        return session

    def forget_former(self, tenant: str, session_id: str) -> None:
        """A session that is not here, but may be on disk, was deleted there."""
        former = self.former(tenant, session_id)
        if former is not None:
            self._former.add(tenant, session_id, Former(Gone.DELETED, former.serial))

    def forget_all(self, tenant: str, *, before: int | None = None, limit: int | None = None) -> list[Session]:
        """Drop a tenant's sessions, oldest first: those first seen before serial `before`, `limit` at most."""
        old = (each for each in self._by_serial.get(tenant, {}).values() if before is None or each.serial < before)
        chosen = list(islice(old, limit))
        for session in chosen:
            self._drop(session, Gone.DELETED)
        return chosen

    @property
    def end_serial(self) -> int:
        """Greater than any serial given so far."""
        return self._next_serial

    # --- what was read back -----------------------------------------------------------------

    def restore(
        self, sessions: Iterable[Session], others: Iterable[tuple[str, str, int]] = (), next_serial: int = 0
    ) -> list[tuple[Session, Branch]]:
        """Take in sessions of an earlier process, before any of this one; says which had to make room.

        Each comes once, with its branches. `others` are (tenant, id, serial) of sessions that another model
        has: an id of theirs is told from one that never was. Serials from `next_serial` on are free.
        """
        assert not self._sessions, "sessions are restored before any begins"
        for tenant, session_id, serial in others:
            self._former.add(tenant, session_id, Former(Gone.OTHER_MODEL, serial))
        ordered = sorted(sessions, key=lambda each: each.last_active)
        for session in ordered:
            assert session.serial < next_serial
            self._sessions[session.tenant, session.id] = session
            self._former.discard(session.tenant, session.id)
            for branch in session.branches.values():
                self._texts.add(session, branch)
                if branch.terms.expire_seconds is not None:
                    self._set_expiry(session, branch)
        for session in sorted(ordered, key=lambda each: each.serial):
            self._by_serial.setdefault(session.tenant, {})[session.serial] = session
        self._next_serial = max(self._next_serial, next_serial)
        return list(self._trim_sessions())

    def recall(self, session: Session, branch: Branch, history: History) -> None:
        """The history of a branch has been read. Does nothing where the branch has gone or moved on meanwhile."""
        if isinstance(branch.history, Unread) and session.branches.get(branch.index) is branch:
            assert history.digests == branch.history.digests, "what finds it by its text stays the same"
            branch.history = history

    def lose(self, session: Session, branch: Branch, why: Gone) -> bool:
        """The history of a branch cannot be had any more: the branch goes; False where it has gone already."""
        if session.is_forgotten or session.branches.get(branch.index) is not branch:
            return False
        self._drop_branch(session, branch, why)
        return True

    # --- within -----------------------------------------------------------------------------

    def _known(self, tenant: str, session_id: str) -> Session:
        session = self.get(tenant, session_id)
        if session is None:
            raise SessionUnknown(session_id)
        return session

    def _add(self, tenant: str, session_id: str, now: float, parent_id: str | None, group: str | None) -> Session:
        session = Session(tenant, session_id, self._next_serial, now, parent_id, group)
        self._next_serial += 1
        self._sessions[tenant, session_id] = session
        self._by_serial.setdefault(tenant, {})[session.serial] = session
        self._former.discard(tenant, session_id)
        return session

    def _drop(self, session: Session, why: Gone | None = None) -> None:
        """Out of every index; `why` None leaves no trace of the id."""
        del self._sessions[session.tenant, session.id]
        session.is_forgotten = True
        self.num_branches -= len(session.branches)
        own = self._by_serial[session.tenant]
        del own[session.serial]
        if not own:
            del self._by_serial[session.tenant]
        for branch in session.branches.values():
            self._leave_indexes(session, branch)
        if why is not None:
            self._former.add(session.tenant, session.id, Former(why, session.serial))

    def _drop_branch(self, session: Session, branch: Branch, why: Gone) -> None:
        self._leave_indexes(session, branch)
        self._remove(session, branch)
        if not session.branches:
            self._drop(session, why)

    def _leave_indexes(self, session: Session, branch: Branch) -> None:
        self._texts.remove(session, branch)
        self._expiries.discard((session, branch))

    def _set_expiry(self, session: Session, branch: Branch) -> None:
        due = branch.expires_at
        if due is None:
            self._expiries.discard((session, branch))
        elif not branch.is_busy:
            self._expiries.set((session, branch), due)

    def _branch_out(self, session: Session, now: float) -> Branch:
        branch = Branch(session.next_branch, now, session.terms)
        session.next_branch += 1
        self._put(session, branch)
        return branch

    def _put(self, session: Session, branch: Branch) -> None:
        session.branches[branch.index] = branch
        self.num_branches += 1

    def _remove(self, session: Session, branch: Branch) -> None:
        """One that is gone already stays so, and those of a forgotten session count no more."""
        if session.branches.pop(branch.index, None) is not None and not session.is_forgotten:
            self.num_branches -= 1

    def _touch(self, session: Session, branch: Branch, now: float) -> None:
        branch.last_active = session.last_active = now
        self._sessions.move_to_end((session.tenant, session.id))

    def _close(self, turn: OpenTurn) -> Branch:
        assert turn.is_open
        turn.is_open = False
        turn.branch.is_busy = False
        return turn.branch

    def _trim_branches(self, session: Session) -> Iterator[tuple[Session, Branch]]:
        while len(session.branches) > self.max_branches:
            idle = list(_idle(session))
            if not idle:
                return
            oldest = min(idle, key=lambda branch: branch.last_active)
            self._drop_branch(session, oldest, Gone.EVICTED)
            yield session, oldest

    def _trim_sessions(self, keep: Session | None = None) -> Iterator[tuple[Session, Branch]]:
        while len(self._sessions) > self.max_sessions:
            # Busy ones were active lately, so they sit at the far end: this looks at one or two.
            idle = (session for session in self._sessions.values() if session is not keep and not session.is_busy)
            oldest = next(idle, None)
            if oldest is None:
                return
            self._drop(oldest, Gone.EVICTED)
            yield from ((oldest, branch) for branch in oldest.branches.values())


def _idle(session: Session) -> Iterator[Branch]:
    return (branch for branch in session.branches.values() if not branch.is_busy)


def _beats(branch: Branch, shared: int, best: Match) -> bool:
    assert best.branch is not None
    return (shared, branch.last_active) > (best.shared_tokens, best.branch.last_active)
