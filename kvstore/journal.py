"""Who writes down what lies on NVMe, and removes it: the planner's word, carried out elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.events import RecordedBlock


class BlockJournal(Protocol):
    """Every call returns at once, on the event loop, and keeps the order of calls; none raises for what a disk does."""

    def record(self, blocks: tuple[RecordedBlock, ...]) -> None:
        """These blocks are in their slots, whole."""

    def forget(self, slots: tuple[int, ...]) -> None:
        """What is in these slots is not to be found again, if it was recorded."""

    def erase(self, slots: tuple[int, ...], done: Callable[[], None]) -> None:
        """As `forget`, and the bytes have to go: `done` is called on the event loop, later, once they have.

        Until then nothing else is written to these slots; if they cannot be erased it is never called.
        """


class NullJournal:
    """For a store that nothing outlives."""

    def record(self, blocks: tuple[RecordedBlock, ...]) -> None: ...

    def forget(self, slots: tuple[int, ...]) -> None: ...

    def erase(self, slots: tuple[int, ...], done: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(done)
