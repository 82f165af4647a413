"""Finds the branch whose text a prompt goes on from (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.session import Branch, Session

LOOKED_AT = 64
"""Latest branches of one text that `find` compares; thousands may hold the same conversation."""


class TextIndex:
    """Branches by the digests of their history, within each tenant."""

    def __init__(self) -> None:
        self._by_digest: dict[tuple[str, bytes], dict[Branch, Session]] = {}  # oldest first

    def add(self, session: Session, branch: Branch) -> None:
        """The branch is the latest of its texts."""
        for digest in branch.history.digests:
            self._by_digest.setdefault((session.tenant, digest), {})[branch] = session

    def remove(self, session: Session, branch: Branch) -> None:
        """Forget the branch under every text of its history."""
        for digest in branch.history.digests:
            key = (session.tenant, digest)
            sharing = self._by_digest.get(key, {})
            sharing.pop(branch, None)
            if not sharing:
                self._by_digest.pop(key, None)

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

    def holders(self, tenant: str, digest: bytes) -> list[tuple[Session, Branch]]:
        """Whose histories have this digest, busy branches included; the session first seen comes first."""
        found = [(session, branch) for branch, session in self._by_digest.get((tenant, digest), {}).items()]
        return sorted(found, key=lambda each: each[0].serial)


def _kinship(branch: Branch, session: Session, parent_id: str | None, group: str | None) -> tuple[bool, bool, float]:
    """How close a branch is to a request that names its parent and its group, at most."""
    return (
        parent_id is not None and session.id == parent_id,
        group is not None and session.group == group,
        branch.last_active,
    )
