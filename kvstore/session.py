"""A session, its branches, and what a turn is to them: the values that the book of sessions keeps (pure).

token_ids  [0, shared)  of the branch that a turn continues: the same in its prompt
           [shared, h)  superseded once that turn completes
K/V        [0, h - 1)   the last token was sampled and never computed
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore import chain
from kvstore.history import NOTHING, History, Unread
from kvstore.terms import SILENT, USUAL, Terms, Wishes

if TYPE_CHECKING:
    from kvstore.former import Former
    from kvstore.types import BlockKey


@dataclass(slots=True, eq=False)
class Branch:
    """One conversation of a session; `index` is never given twice within it. Times as `now` was given.

    `keys` are those of its storable blocks, packed (chain.pack): full blocks of all tokens but the
    last, which was sampled and never computed. `expected_return` is when its client means to be back.
    `written_blocks`: of a branch that was read back after a restart, how many of its blocks, from the first
    on, were on NVMe then; None from its next turn on, and for a branch of this process.
    """

    index: int
    last_active: float
    terms: Terms = USUAL
    history: History | Unread = NOTHING
    keys: bytes = b""
    turns: int = 0
    is_busy: bool = False
    expected_return: float | None = None
    written_blocks: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of its history."""
        return self.history.num_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V the last turn computed."""
        return max(0, self.num_tokens - 1)

    @property
    def block_keys(self) -> tuple[BlockKey, ...]:
        """Keys of its storable blocks, in order."""
        return chain.unpack(self.keys)

    @property
    def tip(self) -> BlockKey | None:
        """The key of its last storable block: what the store knows it by."""
        return chain.last(self.keys)

    @property
    def expires_at(self) -> float | None:
        """When it will be gone unless something happens on it."""
        return None if self.terms.expire_seconds is None else self.last_active + self.terms.expire_seconds


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """All branches of one (tenant, id), by index. `serial` orders sessions by when they were first seen.

    `terms` are those of branches yet to come.
    """

    tenant: str
    id: str
    serial: int
    created: float
    parent_id: str | None = None
    group: str | None = None
    terms: Terms = USUAL
    branches: dict[int, Branch] = field(default_factory=dict)
    turns: int = 0
    last_active: float = 0.0
    is_forgotten: bool = False
    next_branch: int = 0

    @property
    def is_busy(self) -> bool:
        """Some turn of it is in flight."""
        return any(branch.is_busy for branch in self.branches.values())

    @property
    def latest(self) -> Branch | None:
        """The branch that a turn most likely continues: of those with a history an idle one, active last."""
        told = (branch for branch in self.branches.values() if branch.turns)
        return max(told, key=lambda branch: (not branch.is_busy, branch.last_active), default=None)


@dataclass(frozen=True, slots=True)
class Match:
    """Which branch a prompt continues: `branch` None means a new one; `shared_tokens` are then 0.

    `has_unread`: of some idle branch the history could not be looked at, so it was passed over.
    """

    branch: Branch | None
    shared_tokens: int
    history_tokens: int
    is_known_session: bool
    has_unread: bool = False


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn in flight: its branch is busy until `record` or `abandon` closes it.

    `number` counts the branch's turns from 1; `terms` are the branch's once it completes.
    `former` is what the id was before, for a new session. `forgotten` had to go to make room.
    """

    session: Session
    branch: Branch
    match: Match
    number: int
    terms: Terms
    wishes: Wishes = SILENT
    former: Former | None = None
    forgotten: tuple[tuple[Session, Branch], ...] = ()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a completed turn replaced: tokens [`kept_tokens`, end) of `previous_ids` are superseded.

    `superseded` are the keys of its storable blocks that the branch no longer has; the store knew
    the branch by `old_tip` and knows it by `tip` from now on. `is_known` is false where the session
    was forgotten meanwhile: then nothing was recorded.
    """

    is_known: bool
    previous_ids: array[int]
    kept_tokens: int
    tip: BlockKey | None = None
    old_tip: BlockKey | None = None
    superseded: tuple[BlockKey, ...] = ()

    @property
    def superseded_tokens(self) -> int:
        """Tokens of the branch's former tail that no longer belong to it."""
        return len(self.previous_ids) - self.kept_tokens


@dataclass(frozen=True, slots=True)
class Page:
    """Sessions, newest first; `before` fetches the next page, None where this is the last."""

    sessions: tuple[Session, ...]
    before: int | None
