"""The catalog: what of sessions and blocks outlives the process, in one SQLite file at the root of the NVMe directory.

    open        judge the file, set a bad one aside, drop what has expired          (blocking)
    folder      the served model's place                                            (blocking)
    restore     its sessions without their histories, its blocks, slots to erase    (blocking)
    start       the thread that writes; from now on nothing blocks but `read` and `wait`
    ...         kept, dropped, placed, cleared: returns at once, never raises
    close

Sessions belong to a model: their ids are its tokenizer's, their keys its weights'. Those of other models stay as
they are, and continue when theirs is served again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvstore import catalog_reading as reading
from kvstore.catalog_file import CatalogFile, FolderRow, Judgement, is_of_the_medium, judge, set_aside
from kvstore.catalog_writer import CatalogWriter
from kvstore.errors import SettingInvalid
from kvstore.reuse import MissReason

if TYPE_CHECKING:
    from kvstore.catalog_pending import Pending
    from kvstore.catalog_reading import Blocks, ReadFault
    from kvstore.catalog_rows import PlacedBlock, SlotShape
    from kvstore.catalog_writer import CatalogHealth
    from kvstore.clocks import Clocks
    from kvstore.history import History, Unread
    from kvstore.session import Session

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE_NAME = "catalog.sqlite"
DIRECTORY_FLAG = "--nvme-dir"


@dataclass(frozen=True, slots=True)
class Loss:
    """An earlier catalog could not be used; `kept_as` is where it is now, None where there was none beside slabs."""

    reason: MissReason
    kept_as: Path | None


@dataclass(frozen=True, slots=True)
class Restored:
    """What an earlier process left for this model.

    `others` are (tenant, id, serial) of sessions of other models. In `unclaimed` slots lie blocks that no session
    has, such as those of a session whose deletion a crash interrupted: they are to be erased before any turn.
    """

    sessions: list[Session]
    others: list[tuple[str, str, int]]
    next_serial: int
    blocks: Blocks
    unclaimed: list[int]


class Catalog:
    """See the module."""

    def __init__(self, file: CatalogFile, loss: Loss | None) -> None:
        self.path = file.path
        self.loss = loss
        self._file: CatalogFile | None = file
        self._writer: CatalogWriter | None = None

    @classmethod
    def open(cls, path: Path, wall: float) -> Catalog:
        """The catalog of the directory that `path` is in, made if need be; `wall` is the time. Blocking.

        Raises:
            SettingInvalid: the disk refuses it.
        """
        try:
            loss = _loss(path)
            try:
                return cls(_swept(path, wall), loss)
            except sqlite3.DatabaseError as error:
                if is_of_the_medium(error):
                    raise
                log.error("the catalog is damaged: %s", error)
                loss = Loss(MissReason.CATALOG_LOST, set_aside(path, Judgement.DAMAGED))
                return cls(_swept(path, wall), loss)
        except (sqlite3.Error, OSError) as error:
            raise SettingInvalid(DIRECTORY_FLAG, f"the catalog {path} cannot be used: {error}") from error

    # --- before it starts -------------------------------------------------------------------

    def folder(self, name: str, model_key: bytes, shape: SlotShape, wall: float) -> FolderRow:
        """The place of a model, made if need be, and used now.

        A file that turns out to be damaged is set aside, here and by `restore`: `loss` says so.
        """
        return self._or_anew(lambda: self._folder(name, model_key, shape, wall))

    def _folder(self, name: str, model_key: bytes, shape: SlotShape, wall: float) -> FolderRow:
        known = reading.folders(self.path)
        found = next((each for each in known if each.model_key == model_key), None)
        if found is None:
            number = 1 + max((each.number for each in known), default=0)
            found = FolderRow(number, model_key, name, shape, wall, False)
        found = replace(found, name=name, shape=shape, last_used=wall)
        self._own.keep_folder(found)
        return found

    def folders(self) -> list[FolderRow]:
        """Of every model, the longest unused first."""
        return reading.folders(self.path)

    def restore(
        self,
        folder: FolderRow,
        clocks: Clocks,
        max_sessions: int,
        scan: Callable[[], Iterable[PlacedBlock]],
        num_slots: int | None = None,
    ) -> Restored:
        """What there is of a folder. More than `max_sessions` are dropped, the least recently active ones first.

        Slots from `num_slots` on are no more, where the quota has become smaller: they are forgotten. `scan` reads the
        headers of the folder's slots: asked where the catalog does not have all its blocks, because it is new or was
        lost.
        """
        with reading.no_garbage_collection():
            return self._or_anew(lambda: self._restored(folder, clocks, max_sessions, scan, num_slots), folder)

    def _or_anew(self, attempt: Callable[[], T], folder: FolderRow | None = None) -> T:
        """What `attempt` reads, or, where the file is damaged, what it reads of a new one with `folder` in it."""
        try:
            return attempt()
        except (sqlite3.Error, ValueError, TypeError) as error:
            if isinstance(error, sqlite3.Error) and is_of_the_medium(error):
                raise SettingInvalid(DIRECTORY_FLAG, f"the catalog {self.path} cannot be read: {error}") from error
            log.error("the catalog is damaged: %s", error)
        self._own.close()
        self.loss = Loss(MissReason.CATALOG_LOST, set_aside(self.path, Judgement.DAMAGED))
        self._file = CatalogFile(self.path)
        if folder is not None:
            self._file.keep_folder(replace(folder, has_all_blocks=False))
        return attempt()

    def _restored(
        self,
        folder: FolderRow,
        clocks: Clocks,
        max_sessions: int,
        scan: Callable[[], Iterable[PlacedBlock]],
        num_slots: int | None,
    ) -> Restored:
        was_whole = any(each.number == folder.number and each.has_all_blocks for each in reading.folders(self.path))
        if not was_whole:
            self._own.replace_blocks(folder.number, scan())
        if num_slots is not None:
            self._own.clear_from(folder.number, num_slots)
        sessions = sorted(reading.sessions(self.path, folder.number, clocks), key=lambda each: each.last_active)
        too_many = sessions[: max(0, len(sessions) - max_sessions)]
        if too_many:
            sessions = sessions[len(too_many) :]
            self._own.drop_sessions(session.serial for session in too_many)
        branches = [branch for session in sessions for branch in session.branches.values()]
        blocks = reading.blocks(self.path, folder.number)
        written = reading.claim(blocks, [(branch.keys, branch.last_active) for branch in branches])
        for branch, count in zip(branches, written, strict=True):
            branch.written_blocks = count
        return Restored(
            sessions=sessions,
            others=reading.others(self.path, folder.number),
            next_serial=reading.next_serial(self.path),
            blocks=blocks,
            # Just read from the slots' headers, they may be those of sessions that the lost catalog had: the
            # prompts that made them may come again. Nobody claims them by the next start? Then they go.
            unclaimed=blocks.unclaimed() if was_whole else [],
        )

    def unclaimed(self, folder: FolderRow) -> list[int]:
        """Slots of any folder whose blocks no session of it has: what `wants_sweep` asks to erase."""
        blocks = reading.blocks(self.path, folder.number)
        reading.claim(blocks, [(keys, 0.0) for keys in reading.branch_keys(self.path, folder.number)])
        return blocks.unclaimed()

    def swept(self, folder: FolderRow, slots: Iterable[int]) -> None:
        """`slots` have been erased, and they were all that was unclaimed when `folder` was read."""
        self._own.clear_slots(folder.number, slots)
        self._own.swept(folder.number, folder.wants_sweep)
        self._own.empty_log()

    def drop_sessions(self, serials: Iterable[int]) -> None:
        """Sessions of any model are gone, with what was said in them; their folders want a sweep."""
        self._own.drop_sessions(serials)
        self._own.empty_log()

    def drop_folder(self, folder: FolderRow) -> None:
        """A model's place is gone from the directory, with all that was in it."""
        self._own.drop_folder(folder.number)
        self._own.empty_log()

    def compact(self) -> None:
        """Give back what deleted rows have left free."""
        self._own.compact()

    # --- while it runs ----------------------------------------------------------------------

    def start(self, folder: FolderRow, next_serial: int, on_lost: Callable[[], None] = lambda: None) -> None:
        """Begin to write, for sessions of `folder`. `on_lost` is called, on the writing thread, when the file had to
        be made anew: whatever is known is to be put again."""
        self._writer = CatalogWriter(self._own, folder, next_serial, on_lost)
        self._file = None

    def put(self, change: Callable[[Pending], None]) -> int:
        """Have `change` say what is to be written; returns at once, with a number to `wait_written` for, and never
        raises for what a disk does."""
        assert self._writer is not None
        return self._writer.put(change)

    @property
    def version(self) -> int:
        """The number of what was put last."""
        assert self._writer is not None
        return self._writer.version

    def wait_written(self, version: int, seconds: float) -> bool:
        """Wait until what `put` numbered so is committed; blocking. False: not yet."""
        assert self._writer is not None
        return self._writer.wait_written(version, seconds)

    def read(self, unread: Unread) -> History | ReadFault:
        """One history; blocking."""
        return reading.read_history(self.path, unread)

    def wait(self, seconds: float) -> bool:
        """Wait until all that was put is committed and nothing that was deleted is left in a file; blocking."""
        assert self._writer is not None
        return self._writer.wait(seconds)

    @property
    def health(self) -> CatalogHealth:
        """How its disk does."""
        assert self._writer is not None
        return self._writer.health

    def close(self, seconds: float) -> bool:
        """Write what is pending and let go of the file; blocking. False if the disk took longer."""
        if self._writer is not None:
            return self._writer.close(seconds)
        with suppress(sqlite3.Error):
            self._own.close()
        return True

    @property
    def _own(self) -> CatalogFile:
        assert self._file is not None, "it belongs to the thread that writes"
        return self._file


def _swept(path: Path, wall: float) -> CatalogFile:
    """The file, without what has expired."""
    file = CatalogFile(path)
    try:
        file.expire(wall)
        file.empty_log()  # a crash may have left in it what was deleted
    except BaseException:
        file.close()
        raise
    return file


def _loss(path: Path) -> Loss | None:
    """Look at what is there; set aside what cannot be used."""
    match judge(path):
        case Judgement.SOUND:
            return None
        case Judgement.EMPTY:
            has_slabs = next(path.parent.glob("*/slabs/*.kv"), None) is not None
            return Loss(MissReason.CATALOG_LOST, None) if has_slabs else None
        case Judgement.OTHER_FORMAT:
            return Loss(MissReason.STORE_FORMAT, set_aside(path, Judgement.OTHER_FORMAT))
        case bad:
            return Loss(MissReason.CATALOG_LOST, set_aside(path, bad))
