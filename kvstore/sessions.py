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
   are forgotten first. What is busy is never forgotten to make room.

    token_ids  [0, shared)  of the branch that a turn continues: the same in its prompt
               [shared, h)  superseded once that turn completes
    K/V        [0, h - 1)   the last token was sampled and never computed
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvstore.chain import common_prefix

DIGEST_BYTES = 16

LOOKED_AT = 64
"""Latest branches of one text that `find` compares; thousands may hold the same conversation."""


class Seam(NamedTuple):
    """The first `num_tokens` ids of a conversation are the first `text_length` characters of its text."""

    text_length: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class History:
    """A conversation as far as a completed turn took it, its answer included.

    `text` is the rendered prompt and the answer as the client saw it; `seams`, in order, are where
    ids and text part cleanly; `message_ends` tells where each message's content ends, in both.
    The first assistant message begins at token `first_answer`. `digests` are of the text up to
    the end of each answer (see `text_digests`): a later request without an id is known by them.
    """

    token_ids: array[int]
    text: str
    seams: tuple[Seam, ...]
    first_answer: int
    message_ends: tuple[Seam, ...] = ()
    digests: tuple[bytes, ...] = ()


NOTHING = History(array("I"), "", (), 0)
"""What a branch has before its first turn completes."""


@dataclass(slots=True, eq=False)
class Branch:
    """One conversation of a session; `index` is never given twice within it. Times as `now` was given."""

    index: int
    last_active: float
    priority: int = 0
    history: History = NOTHING
    turns: int = 0
    is_busy: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V the last turn computed."""
        return max(0, len(self.history.token_ids) - 1)


@dataclass(slots=True, eq=False)
class Session:
    """All branches of one (tenant, id), by index. `serial` orders sessions by when they were first seen."""

    tenant: str
    id: str
    serial: int
    parent_id: str | None = None
    group: str | None = None
    branches: dict[int, Branch] = field(default_factory=dict)
    turns: int = 0
    last_active: float = 0.0
    is_forgotten: bool = False
    next_branch: int = 0

    @property
    def is_busy(self) -> bool:
        """Some turn of it is in flight."""
        return any(branch.is_busy for branch in self.branches.values())


@dataclass(frozen=True, slots=True)
class Match:
    """Which branch a prompt continues: `branch` None means a new one; `shared_tokens` are then 0."""

    branch: Branch | None
    shared_tokens: int
    history_tokens: int
    is_known_session: bool


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn in flight: its branch is busy until `record` or `abandon` closes it.

    `number` counts the branch's turns from 1. `forgotten` had to go to make room.
    """

    session: Session
    branch: Branch
    match: Match
    number: int
    forgotten: tuple[tuple[Session, Branch], ...] = ()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a completed turn replaced: tokens [`kept_tokens`, end) of `previous_ids` are superseded.

    `is_known` is false where the session was forgotten meanwhile: then nothing was recorded.
    """

    is_known: bool
    previous_ids: array[int]
    kept_tokens: int

    @property
    def superseded_tokens(self) -> int:
        """Tokens of the branch's former tail that no longer belong to it."""
        return len(self.previous_ids) - self.kept_tokens


@dataclass(frozen=True, slots=True)
class Page:
    """Sessions, newest first; `before` fetches the next page, None where this is the last."""

    sessions: tuple[Session, ...]
    before: int | None


def text_digests(text: str, ends: Sequence[int]) -> tuple[bytes, ...]:
    """Running digests of `text` up to each of the ascending offsets `ends`; 16 bytes each."""
    running = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"dormouse-text")
    digests, start = [], 0
    for end in ends:
        running.update(text[start:end].encode("utf-8", "surrogatepass"))
        digests.append(running.digest())
        start = end
    return tuple(digests)


class SessionBook:
    """All sessions that are remembered, by tenant and id. Not thread-safe: the event loop owns it."""

    def __init__(self, *, max_sessions: int = 100_000, max_branches: int = 16) -> None:
        assert max_sessions > 0
        assert max_branches > 0
        self.max_sessions = max_sessions
        self.max_branches = max_branches
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()  # least recently active first
        self._by_serial: dict[str, dict[int, Session]] = {}
        self._by_digest: dict[tuple[str, bytes], dict[Branch, Session]] = {}  # oldest first
        self._next_serial = 0

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
        return [branch.history for branch in branches if branch.turns]

    def match(self, tenant: str, session_id: str, token_ids: array[int]) -> Match:
        """Which branch of the session a prompt of `token_ids` continues; changes nothing."""
        session = self.get(tenant, session_id)
        best: Match | None = None
        for branch in _idle(session) if session is not None else ():
            shared = common_prefix(branch.history.token_ids, token_ids)
            if shared >= max(1, branch.history.first_answer) and (best is None or _beats(branch, shared, best)):
                best = Match(branch, shared, len(branch.history.token_ids), True)
        return best if best is not None else Match(None, 0, 0, session is not None)

    def find(
        self, tenant: str, digests: Sequence[bytes], *, parent_id: str | None = None, group: str | None = None
    ) -> Session | None:
        """The session with an idle branch that has the longest of these ascending prefixes of a text.

        Among equals the parent's own branches come first, then those of the same group, then the latest.
        """
        for digest in reversed(digests):
            latest = islice(reversed(self._by_digest.get((tenant, digest), {}).items()), LOOKED_AT)
            found = [(branch, session) for branch, session in latest if not branch.is_busy]
            if found:
                return max(found, key=lambda each: _kinship(each[0], each[1], parent_id, group))[1]
        return None

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
        priority: int = 0,
    ) -> OpenTurn:
        """Start a turn on the branch that `token_ids` continues, or on a new one; marks it busy.

        Close it with `record` or `abandon`, exactly once.
        """
        match = self.match(tenant, session_id, token_ids)
        session = self.get(tenant, session_id) or self._add(tenant, session_id, parent_id, group)
        branch = match.branch or self._branch_out(session, now)
        branch.is_busy = True
        branch.priority = priority
        self._touch(session, branch, now)
        forgotten = (*self._trim_branches(session), *self._trim_sessions())
        return OpenTurn(session, branch, match, branch.turns + 1, forgotten)

    def record(self, turn: OpenTurn, history: History, now: float) -> Recorded:
        """Close a turn that completed: `history` replaces what its branch had."""
        previous = self._close(turn).history
        if turn.session.is_forgotten:
            return Recorded(False, array("I"), 0)
        self._unindex(turn.session, turn.branch)
        turn.branch.history = history
        turn.branch.turns += 1
        turn.session.turns += 1
        self._index(turn.session, turn.branch)
        self._touch(turn.session, turn.branch, now)
        return Recorded(True, previous.token_ids, common_prefix(previous.token_ids, history.token_ids))

    def abandon(self, turn: OpenTurn) -> None:
        """Close a turn that did not complete (or must not be kept): its branch stays as it was."""
        branch = self._close(turn)
        session = turn.session
        if branch.turns == 0:
            session.branches.pop(branch.index, None)
        if not session.branches and not session.is_forgotten:
            self.forget(session.tenant, session.id)

    # --- forgetting -------------------------------------------------------------------------

    def forget(self, tenant: str, session_id: str) -> Session | None:
        """Drop a session with all its branches; turns in flight run on and are not recorded."""
        session = self._sessions.pop((tenant, session_id), None)
        if session is None:
            return None
        session.is_forgotten = True
        own = self._by_serial[tenant]
        del own[session.serial]
        if not own:
            del self._by_serial[tenant]
        for branch in session.branches.values():
            self._unindex(session, branch)
        return session

    def forget_all(self, tenant: str) -> list[Session]:
        """Drop every session of a tenant."""
        return [gone for session in self._of(tenant) if (gone := self.forget(tenant, session.id)) is not None]

    # --- within -----------------------------------------------------------------------------

    def _of(self, tenant: str) -> list[Session]:
        return list(self._by_serial.get(tenant, {}).values())

    def _add(self, tenant: str, session_id: str, parent_id: str | None, group: str | None) -> Session:
        session = Session(tenant, session_id, self._next_serial, parent_id, group)
        self._next_serial += 1
        self._sessions[tenant, session_id] = session
        self._by_serial.setdefault(tenant, {})[session.serial] = session
        return session

    def _branch_out(self, session: Session, now: float) -> Branch:
        branch = Branch(session.next_branch, now)
        session.next_branch += 1
        session.branches[branch.index] = branch
        return branch

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
            self._unindex(session, oldest)
            del session.branches[oldest.index]
            yield session, oldest

    def _trim_sessions(self) -> Iterator[tuple[Session, Branch]]:
        while len(self._sessions) > self.max_sessions:
            # Busy ones were active lately, so they sit at the far end: this looks at one or two.
            oldest = next((session for session in self._sessions.values() if not session.is_busy), None)
            if oldest is None:
                return
            self.forget(oldest.tenant, oldest.id)
            yield from ((oldest, branch) for branch in oldest.branches.values())

    def _index(self, session: Session, branch: Branch) -> None:
        for digest in branch.history.digests:
            self._by_digest.setdefault((session.tenant, digest), {})[branch] = session

    def _unindex(self, session: Session, branch: Branch) -> None:
        for digest in branch.history.digests:
            key = (session.tenant, digest)
            sharing = self._by_digest.get(key, {})
            sharing.pop(branch, None)
            if not sharing:
                self._by_digest.pop(key, None)


def _idle(session: Session) -> Iterator[Branch]:
    return (branch for branch in session.branches.values() if not branch.is_busy)


def _kinship(branch: Branch, session: Session, parent_id: str | None, group: str | None) -> tuple[bool, bool, float]:
    """How close a branch is to a request that names its parent and its group, at most."""
    return (
        parent_id is not None and session.id == parent_id,
        group is not None and session.group == group,
        branch.last_active,
    )


def _beats(branch: Branch, shared: int, best: Match) -> bool:
    assert best.branch is not None
    return (shared, branch.last_active) > (best.shared_tokens, best.branch.last_active)
