"""What became of blocks that could not be read: remembered until they are there again (pure).

A hint, or a turn's arrival, may find out that a block is no good, and drop it, before the turn asks for it. The turn
is told why all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.events import Miss
    from kvstore.types import BlockKey

MOST_REMEMBERED = 4096
"""Blocks; of a disk that has lost more than these at once the rest counts as evicted."""


class Blames:
    """By block; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._known: OrderedDict[BlockKey, Miss] = OrderedDict()

    def note(self, key: BlockKey, why: Miss) -> None:
        """The block could not be read, and is dropped for it."""
        self._known[key] = why
        self._known.move_to_end(key)
        if len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)

    def clear(self, key: BlockKey) -> None:
        """The block is there again."""
        self._known.pop(key, None)

    def of(self, key: BlockKey) -> Miss | None:
        """Why the block is not there, if that is why."""
        return self._known.get(key)

    def __bool__(self) -> bool:
        return bool(self._known)
