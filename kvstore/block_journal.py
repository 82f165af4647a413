"""One folder's slots, as the planner tells of them: written down in the catalog, and erased from the files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvstore.workers import Workers

if TYPE_CHECKING:
    from kvstore.catalog import Catalog
    from kvstore.catalog_file import FolderRow
    from kvstore.catalog_pending import Pending
    from kvstore.catalog_rows import PlacedBlock

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
FORGETTING_SECONDS = 5.0
"""A commit takes milliseconds. Where it takes longer the slot is written to all the same: a reader who is led there
finds another block's header."""


class FolderBlocks:
    """Called on the event loop; every call returns at once, and none raises for what a disk does.

    `erase` is the slots' store's: blocking, it returns those slots that may still hold their bytes.
    """

    def __init__(self, catalog: Catalog, folder: FolderRow, erase: Callable[[Iterable[int]], tuple[int, ...]]) -> None:
        self._catalog = catalog
        self._folder = folder.number
        self._erase = erase
        self._forgetting: dict[int, int] = {}  # slot -> the number its forgetting was put under
        self._workers = Workers("nvme-erase", 1)
        self._is_closed = False

    def record(self, blocks: Iterable[PlacedBlock]) -> None:
        """These blocks are in their slots, whole."""
        rows = tuple(blocks)

        def change(pending: Pending) -> None:
            for row in rows:
                pending.place(self._folder, row)

        self._catalog.put(change)

    def forget(self, slots: Iterable[int]) -> None:
        """What is in these slots is not to be found again."""
        cleared = tuple(slots)
        self._note(cleared, forget_slots(self._catalog, self._folder, cleared))

    def await_forgotten(self, slots: Iterable[int]) -> None:
        """The slots are about to be written to: what they held is out of the catalog's file before, so that after a
        kill it names no slot that holds something else. Blocking; called on a copy's thread."""
        version = max((self._forgetting.pop(slot, 0) for slot in slots), default=0)
        if version:
            self._catalog.wait_written(version, FORGETTING_SECONDS)

    def _note(self, slots: tuple[int, ...], version: int) -> None:
        self._forgetting.update(dict.fromkeys(slots, version))

    def erase(self, slots: Iterable[int], done: Callable[[], None]) -> None:
        """As `forget`, and the bytes have to go: `done` is called on the event loop once they have, tried again and
        again. The catalog forgets them only then: what a crash interrupts is found at the next start and erased."""
        self._try(tuple(slots), done, FIRST_RETRY_SECONDS, self._catalog.version)

    def _forget_erased(self, slots: tuple[int, ...]) -> None:
        def change(pending: Pending) -> None:
            for slot in slots:
                pending.erase(self._folder, slot)

        self._note(slots, self._catalog.put(change))

    def close(self) -> None:
        """Erase what was asked for, and take no more."""
        self._is_closed = True
        self._workers.close()

    def _try(self, slots: tuple[int, ...], done: Callable[[], None], retry_seconds: float, version: int) -> None:
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()

        def ended(left: tuple[int, ...]) -> None:
            self._forget_erased(tuple(slot for slot in slots if slot not in left))
            if not left:
                done()
                return
            longer = min(LONGEST_RETRY_SECONDS, 2 * retry_seconds)
            loop.call_later(retry_seconds, self._try, left, done, longer, version)

        def erase() -> None:
            # Whose blocks they were is out of the file first: a session that a kill brings back has all of its own.
            self._catalog.wait_written(version, FORGETTING_SECONDS)
            loop.call_soon_threadsafe(ended, self._erase(slots))

        self._workers.submit(erase, urgent=False)


def forget_slots(catalog: Catalog, folder: int, slots: Iterable[int]) -> int:
    """Nothing is in these slots of a folder any more; the number to wait for."""
    cleared = tuple(slots)

    def change(pending: Pending) -> None:
        for slot in cleared:
            pending.clear(folder, slot)

    return catalog.put(change)


def note_swept(catalog: Catalog, folder: FolderRow, slots: Iterable[int]) -> None:
    """As Catalog.swept, while the catalog is being written: `slots` were all that nobody claims."""
    cleared = tuple(slots)

    def change(pending: Pending) -> None:
        for slot in cleared:
            pending.erase(folder.number, slot)
        pending.sweep(folder.number, folder.wants_sweep)

    catalog.put(change)
