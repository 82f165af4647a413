"""What lies in an NVMe directory, and its upkeep: list, verify, collect, remove.

The same for a server, beside its turns, and for `dormouse store` where none runs. Everything here blocks.
A server owns the slots of the model it serves: there its planner erases, and only the other models' are touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvstore import catalog_reading as reading
from kvstore.block_journal import note_swept
from kvstore.catalog_reading import ReadFault
from kvstore.errors import SettingInvalid
from kvstore.events import TransferEnd
from kvstore.tiers.nvme import NvmeStore

if TYPE_CHECKING:
    from kvstore.block_journal import FolderBlocks
    from kvstore.catalog import Catalog
    from kvstore.catalog_file import FolderRow
    from kvstore.nvme_dir import ModelFolder, NvmeDirectory
    from kvstore.workers import Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

SWEEP_SECONDS = 5.0

UNSWEPT = -1
"""What no folder wants: one that was not swept whole wants it still."""

ANY_NUMBER = 2**40
"""Slots of a folder that is opened without its quota: nothing of it is to be cut off."""

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, how much there is."""


def silent(_what: str, _done: int, _whole: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The parts of a running server's NVMe tier."""

    directory: NvmeDirectory
    catalog: Catalog
    folder: FolderRow
    store: NvmeStore
    blocks: FolderBlocks
    upkeep: Workers
    """Where what is slow runs: daemons, so that a disk that hangs keeps nobody from ending."""

    async def sweep_others(self) -> None:
        """Erase what sessions of other models have left that were deleted here; does nothing where none were.

        A disk that hangs or fails is not waited for: what is left goes at the next start.
        """
        sweeping = self.run(lambda: sweep_others(self.directory, self.catalog, self._swept, self.folder))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sweeping, SWEEP_SECONDS)

    async def collect_others(self) -> dict[str, int]:
        """Erase whatever no session has in the folders of other models; how many blocks, by model."""
        return await self.run(lambda: collect(self.directory, self.catalog, self._swept, self.folder))

    def _swept(self, folder: FolderRow, slots: Iterable[int]) -> None:
        note_swept(self.catalog, folder, slots)

    async def run(self, job: Callable[[], T]) -> T:
        """What `job` returns, or raises, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.upkeep.place(urgent=False), job)


@dataclass(frozen=True, slots=True)
class FolderReport:
    """One model's place."""

    model: str
    model_key: str
    path: str | None  # None: its files are not there
    blocks: int
    bytes: int  # of its files
    sessions: int
    last_used: float


@dataclass(frozen=True, slots=True)
class SessionReport:
    """One session; whose it is is told only by whether a salt was used."""

    id: str
    is_salted: bool
    model: str
    branches: int
    turns: int
    tokens: int
    last_active: float


@dataclass(frozen=True, slots=True)
class StoreReport:
    """All that is there."""

    path: str
    folders: list[FolderReport]
    sessions: list[SessionReport]
    set_aside: list[str]


@dataclass(slots=True)
class Verdict:
    """What `verify` read and found. `blocks` counts by how reading ended, `histories` likewise."""

    blocks: Counter[str] = field(default_factory=Counter)
    histories: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.faults

    def as_json(self) -> dict[str, object]:
        return {
            "blocks": dict(self.blocks),
            "histories": dict(self.histories),
            "faults": self.faults,
            "sound": self.is_sound,
        }


class Forgetter(Protocol):
    """Takes slots out of the catalog whose bytes are gone, all that were unclaimed."""

    def __call__(self, folder: FolderRow, slots: Iterable[int]) -> None: ...


def report(directory: NvmeDirectory, catalog: Path, limit: int | None = None) -> StoreReport:
    """All that is there; `limit` sessions at most, the latest first."""
    rows = {row.number: row for row in reading.folders(catalog)}
    listed = reading.listing(catalog)
    places = {place.model_key: place for place in directory.folders()}
    counts = Counter(session.folder for session in listed)
    return StoreReport(
        path=str(directory.root),
        folders=[_folder_report(catalog, row, places.get(row.model_key), counts[row.number]) for row in rows.values()],
        sessions=[
            SessionReport(
                id=session.id,
                is_salted="\0" in session.tenant,
                model=rows[session.folder].name,
                branches=session.branches,
                turns=session.turns,
                tokens=session.tokens,
                last_active=session.last_active,
            )
            for session in listed[:limit]
        ],
        set_aside=[str(path) for path in set_aside(directory)],
    )


def _folder_report(catalog: Path, row: FolderRow, place: ModelFolder | None, sessions: int) -> FolderReport:
    return FolderReport(
        model=row.name,
        model_key=row.model_key.hex(),
        path=None if place is None else str(place.path),
        blocks=len(reading.blocks(catalog, row.number)),
        bytes=0 if place is None else place.bytes_held,
        sessions=sessions,
        last_used=row.last_used,
    )


def verify(
    directory: NvmeDirectory, catalog: Path, served: tuple[FolderRow, NvmeStore] | None = None, tell: Progress = silent
) -> Verdict:
    """Read the catalog, every history and every slot that it says has a block; what is not as it was is a fault.

    `served` is the folder whose slots change meanwhile: one that did is not a fault.
    """
    verdict = Verdict()
    verdict.faults += [f"catalog: {fault}" for fault in reading.faults(catalog)]
    if verdict.faults:
        return verdict
    _verify_histories(catalog, verdict, tell)
    for row in reading.folders(catalog):
        if served is not None and row.model_key == served[0].model_key:
            _verify_blocks(catalog, row, served[1], verdict, tell)
            continue
        with opened(directory, row) as store:
            _verify_blocks(catalog, row, store, verdict, tell)
    return verdict


def _verify_histories(catalog: Path, verdict: Verdict, tell: Progress) -> None:
    histories = reading.unread_histories(catalog)
    for number, unread in enumerate(histories):
        found = reading.read_history(catalog, unread)
        if found is ReadFault.LOST:
            continue  # its session was deleted meanwhile
        verdict.histories["ok" if not isinstance(found, ReadFault) else found.value] += 1
        if isinstance(found, ReadFault):
            verdict.faults.append(f"history {unread.digest.hex()}: {found.value}")
        tell("histories", number + 1, len(histories))


def _verify_blocks(catalog: Path, row: FolderRow, store: NvmeStore | None, verdict: Verdict, tell: Progress) -> None:
    blocks = reading.blocks(catalog, row.number)
    reading.claim(blocks, [(keys, 0.0) for keys in reading.branch_keys(catalog, row.number)])
    unclaimed = set(blocks.unclaimed())
    for number, (key, _, _, slot, _) in enumerate(blocks.rows()):
        end = TransferEnd.STALE if store is None or slot >= store.num_slots else store.verify(slot, key)
        if end is not TransferEnd.DONE and reading.key_at(catalog, row.number, slot) != key:
            continue  # the slot was given to another block while this one was read
        if end is not TransferEnd.DONE and slot in unclaimed:
            continue  # a kill came while a deleted session's block was erased: the next start goes on with it
        verdict.blocks["ok" if end is TransferEnd.DONE else end.value] += 1
        if end is not TransferEnd.DONE:
            verdict.faults.append(f"{row.name}, slot {slot}: {end.value}")
        tell(f"blocks of {row.name}", number + 1, len(blocks))


def collect(
    directory: NvmeDirectory,
    catalog: Catalog,
    forget: Forgetter,
    served: FolderRow | None = None,
    *,
    wanted_only: bool = False,
) -> dict[str, int]:
    """Erase the blocks that no session has, in every folder but the served one; how many, by model.

    `wanted_only`: where sessions have gone since the last time. Whatever else lies in slots that the catalog says are
    free, such as what a crash left half written, goes as well.
    """
    erased: dict[str, int] = {}
    for row in catalog.folders():
        if (served is not None and row.model_key == served.model_key) or (wanted_only and not row.wants_sweep):
            continue
        slots = catalog.unclaimed(row)
        held = set(reading.blocks(catalog.path, row.number).slots) - set(slots)
        with opened(directory, row) as store:
            left = set() if store is None else set(store.erase(_free(store, held)))
        gone = [slot for slot in slots if slot not in left]
        if left:
            log.warning("%d slots of deleted sessions of %s cannot be erased now", len(left), row.name)
            row = replace(row, wants_sweep=UNSWEPT)
        forget(row, gone)
        if gone:
            erased[row.name] = erased.get(row.name, 0) + len(gone)
    return erased


def sweep_others(directory: NvmeDirectory, catalog: Catalog, forget: Forgetter, served: FolderRow) -> None:
    """Erase what sessions of other models have left, and forget what went with their folders; a folder that cannot be
    used is left for another time."""
    try:
        forget_removed(directory, catalog, forget, served)
        collect(directory, catalog, forget, served, wanted_only=True)
    except (OSError, sqlite3.Error, SettingInvalid) as error:
        log.warning("blocks of deleted sessions of other models are still to be erased: %s", error)


def forget_removed(directory: NvmeDirectory, catalog: Catalog, forget: Forgetter, served: FolderRow) -> None:
    """Folders of other models that gave way, or that somebody removed, took their blocks along."""
    there = {place.model_key for place in directory.folders()}
    for row in catalog.folders():
        if row.model_key not in there and row.model_key != served.model_key:
            slots = list(reading.blocks(catalog.path, row.number).slots)
            if slots:
                forget(row, slots)


def _free(store: NvmeStore, held: set[int]) -> list[int]:
    """Slots that lie in files and hold nothing that is wanted."""
    return sorted({*range(store.slots_made), *(found.slot for found in store.scan())} - held)


@contextmanager
def opened(directory: NvmeDirectory, row: FolderRow) -> Iterator[NvmeStore | None]:
    """The slots of a folder that nobody else has open; None where its files are not there."""
    place = next((place for place in directory.folders() if place.model_key == row.model_key), None)
    if place is None:
        yield None
        return
    store = NvmeStore(
        place,
        ANY_NUMBER,
        row.shape.slot_bytes,
        block_tokens=row.shape.block_tokens,
        make_room=lambda _size: False,
        io="buffered",
    )
    store.open()
    try:
        yield store
    finally:
        store.close()


def set_aside(directory: NvmeDirectory) -> list[Path]:
    """What start-ups could not use and kept: catalogs, and all that another format had left."""
    found = [*directory.root.glob(f"{directory.catalog.name}.*-*"), *directory.root.glob("set-aside-format-*")]
    return sorted(path for path in found if not path.is_symlink())


def remove_aside(paths: Iterable[Path]) -> list[Path]:
    """Remove what `set_aside` found; what went."""
    gone = []
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not path.exists():
            gone.append(path)
    return gone
