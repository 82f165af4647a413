"""Ids that were sessions and are no longer: why, and where they stood in the list (pure).

Only a digest of an id is kept. It tells a client why its session is gone, and lets a list go on
after an entry that was deleted meanwhile.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum


class Gone(StrEnum):
    """Why a session is no longer there."""

    DELETED = "deleted"
    EXPIRED = "expired"
    EVICTED = "evicted"  # more sessions than may be kept
    LOST = "lost"  # its history could no longer be read
    CORRUPT = "corrupt"  # its history did not verify
    OTHER_MODEL = "other_model"  # it is in the catalog, in another model's tokens


@dataclass(frozen=True, slots=True)
class Former:
    """What is still known of a session that is gone; `serial` as in Session."""

    why: Gone
    serial: int


class FormerSessions:
    """The last `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Former] = OrderedDict()

    def add(self, tenant: str, session_id: str, former: Former) -> None:
        """The latest."""
        key = _digest(tenant, session_id)
        self._known[key] = former
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def get(self, tenant: str, session_id: str) -> Former | None:
        """None for an id that never was one, as far as is known."""
        return self._known.get(_digest(tenant, session_id)) if self._known else None

    def discard(self, tenant: str, session_id: str) -> None:
        """The id is a session again."""
        if self._known:
            self._known.pop(_digest(tenant, session_id), None)


def _digest(tenant: str, session_id: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16, person=b"dormouse-former")
    owner = tenant.encode("utf-8", "surrogatepass")
    digest.update(len(owner).to_bytes(8, "little") + owner + session_id.encode("utf-8", "surrogatepass"))
    return digest.digest()
