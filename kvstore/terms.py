"""On which terms a branch is kept: what its clients have asked of it so far (pure).

    priority         lower is sooner, for turns that do not say theirs
    keep_seconds     soft: worth keeping so long after a turn; whoever needs the room gets it
    pinned           soft: asked to stay for good, on the same condition
    expire_seconds   hard: so long after its last activity no byte of it is left in any tier
    persist          disk; memory: never on NVMe; none: gone when its turn has ended

A request that is silent about one of them leaves it as it was: a promise made once is not
taken back by a client that forgot to repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Persist(StrEnum):
    """How deep a branch may sleep."""

    DISK = "disk"
    MEMORY = "memory"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Terms:
    """See the module. `expire_seconds` None: never."""

    priority: int = 0
    keep_seconds: float = 0.0
    pinned: bool = False
    expire_seconds: float | None = None
    persist: Persist = Persist.DISK

    def with_wishes(self, wishes: Wishes) -> Terms:
        """These, where the request said nothing else."""
        return Terms(
            priority=self.priority if wishes.priority is None else wishes.priority,
            keep_seconds=self.keep_seconds if wishes.keep_seconds is None else wishes.keep_seconds,
            pinned=self.pinned,
            expire_seconds=self.expire_seconds if wishes.expire_seconds is None else wishes.expire_seconds,
            persist=self.persist if wishes.persist is None else wishes.persist,
        )


USUAL = Terms()
"""Those of a branch of which nothing was said."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request asks; None says nothing. `final` and `expected_idle_seconds` hold until the next turn."""

    priority: int | None = None
    keep_seconds: float | None = None
    expire_seconds: float | None = None
    persist: Persist | None = None
    expected_idle_seconds: float | None = None
    final: bool = False


SILENT = Wishes()


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the terms of a whole session; None leaves one as it is, `never_expires` takes an expiry back."""

    priority: int | None = None
    keep_seconds: float | None = None
    pinned: bool | None = None
    expire_seconds: float | None = None
    never_expires: bool = False

    def applied_to(self, terms: Terms) -> Terms:
        """New terms."""
        wishes = Wishes(self.priority, self.keep_seconds, self.expire_seconds)
        changed = terms.with_wishes(wishes)
        return replace(
            changed,
            pinned=terms.pinned if self.pinned is None else self.pinned,
            expire_seconds=None if self.never_expires else changed.expire_seconds,
        )
