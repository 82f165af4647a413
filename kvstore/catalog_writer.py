"""The thread that brings the catalog's file to what is pending.

It takes all that is pending, writes it in one transaction, and looks again: while one commit is under way the next
gathers, so the busier the server the larger the group. Nobody waits for it but who asks to (`wait`). Nothing that
the disk does reaches a caller: what could not be written is pending still, tried again later and later, and told as
health meanwhile. A file that was deleted or damaged is made anew, and `on_lost` says that all of it is to be put
again.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.catalog_file import CatalogFile, is_of_the_medium, set_aside
from kvstore.catalog_pending import Pending
from kvstore.events import TierHealth

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.catalog_file import FolderRow
    from kvstore.catalog_pending import Batch

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 5.0
OFF_AFTER_FAULTS = 3
STUCK_SECONDS = 5.0
"""A commit takes milliseconds; one that is under way for longer waits for a disk that does not answer."""
LOG_WAITS_SECONDS = 1.0
"""So long, at most, what was deleted may still be read in the log while more and more is written."""
READER_SECONDS = 0.02
"""A reader keeps the log from being emptied for milliseconds."""


@dataclass(frozen=True, slots=True)
class CatalogHealth:
    """How the catalog's disk does; `reason` is empty while it does well, `faults` counts since the start."""

    state: TierHealth
    reason: str
    faults: int
    pending: int


class CatalogWriter:
    """See the module; `file` is the thread's from now on."""

    def __init__(
        self,
        file: CatalogFile,
        folder: FolderRow,
        next_serial: int,
        on_lost: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._folder = folder
        self._on_lost = on_lost
        self._clock = clock
        self._pending = Pending(next_serial)
        self._changed = threading.Condition()
        self._written = 0  # the version up to which everything is in the file
        self._settled = 0  # the version up to which everything is in the file, and nothing else in its log
        self._log_wanted: float | None = None  # since when the log is to be emptied
        self._failing = 0
        self._faults = 0
        self._reason = ""
        self._busy_since: float | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="catalog", daemon=True)
        self._thread.start()

    # --- any thread ---------------------------------------------------------------------------

    def put(self, change: Callable[[Pending], None]) -> int:
        """Have `change` say what is to be written; returns at once, with a number to `wait_written` for."""
        with self._changed:
            change(self._pending)
            self._changed.notify_all()
            return self._pending.version

    @property
    def version(self) -> int:
        """The number of what was put last."""
        with self._changed:
            return self._pending.version

    def wait_written(self, version: int, seconds: float) -> bool:
        """Wait until what was put under that number is committed; blocking. False: not yet, or the disk refuses."""
        with self._changed:
            self._changed.wait_for(lambda: self._written >= version or self._failing, seconds)
            return self._written >= version

    def wait(self, seconds: float) -> bool:
        """Wait until all that has been put is committed, and nothing deleted is left; blocking. False: not yet."""
        with self._changed:
            version = self._pending.version
            return self._changed.wait_for(lambda: self._settled >= version, seconds)

    def close(self, seconds: float) -> bool:
        """Write what is pending, then end; blocking. False: the disk took longer, and the thread is left to it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def health(self) -> CatalogHealth:
        """As of now."""
        with self._changed:
            busy = 0.0 if self._busy_since is None else self._clock() - self._busy_since
            state, reason = TierHealth.OK, ""
            if self._failing:
                state = TierHealth.OFF if self._failing >= OFF_AFTER_FAULTS else TierHealth.SUSPECT
                reason = self._reason
            elif busy > STUCK_SECONDS:
                state, reason = TierHealth.SUSPECT, f"the disk has not answered for {busy:.0f} s"
            return CatalogHealth(state, reason, self._faults, len(self._pending))

    # --- the thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        while (taken := self._next()) is not None:
            batch, version = taken
            try:
                self._write(batch)
            except (sqlite3.Error, OSError) as error:
                self._put_off(batch, error)
            except Exception as error:  # would fail again and again: this batch is given up, and nothing after it
                log.exception("the catalog could not be told what it was to keep")
                self._note(version, fault=str(error))
            else:
                self._note(version)
        with suppress(sqlite3.Error):
            self._file.close()

    def _next(self) -> tuple[Batch, int] | None:
        """What there is to write, once there is something; None when it is time to end."""
        with self._changed:
            while not len(self._pending) and not self._is_closing:
                if self._settled < self._pending.version:  # it was written, but for the log
                    break
                self._changed.wait()
            if self._is_closing and (self._failing or not len(self._pending)):
                return None
            self._busy_since = self._clock()
            return self._pending.take(), self._pending.version

    def _write(self, batch: Batch) -> None:
        if not self._file.is_in_place:
            log.warning("the catalog %s is gone from its place: another is begun", self._file.path)
            self._begin_another()
        if len(batch):
            self._file.write(self._folder.number, batch)
        if batch.removes and self._log_wanted is None:
            self._log_wanted = self._clock()

    def _note(self, version: int, fault: str = "") -> None:
        """A batch is done with; empty the log if that is due."""
        is_emptied = self._empty_log()
        with self._changed:
            self._busy_since = None
            self._failing = 0
            self._faults += bool(fault)
            self._written = version
            if is_emptied:
                self._settled = version
            elif not len(self._pending) and not self._is_closing:
                self._changed.wait(READER_SECONDS)
            self._changed.notify_all()

    def _empty_log(self) -> bool:
        """Nothing that was deleted is left in the log, as far as can be seen to now."""
        if self._log_wanted is None:
            return True
        with self._changed:
            more = len(self._pending)
        if more and self._clock() - self._log_wanted < LOG_WAITS_SECONDS:
            return False
        try:
            if not self._file.empty_log():
                return False
        except sqlite3.Error as error:
            self._count(error)
            return False
        self._log_wanted = None
        return True

    def _put_off(self, batch: Batch, error: sqlite3.Error | OSError) -> None:
        """Try again later; where the file itself is no good, with another."""
        self._count(error)
        if not is_of_the_medium(error):
            with suppress(sqlite3.Error, OSError):
                self._file.close()
                log.error("the catalog is damaged (%s): kept as %s", error, set_aside(self._file.path, "damaged"))
        with self._changed:
            self._busy_since = None
            self._pending.give_back(batch)
            self._failing += 1
            self._changed.notify_all()
            delay = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** (self._failing - 1))
            self._changed.wait_for(lambda: self._is_closing, delay)

    def _count(self, error: Exception) -> None:
        with self._changed:
            self._faults += 1
            is_new, self._reason = str(error) != self._reason, str(error)
        if is_new:
            log.warning("the catalog cannot be written: %s", error)

    def _begin_another(self) -> None:
        with suppress(sqlite3.Error):
            self._file.close()
        path: Path = self._file.path
        if path.exists():
            set_aside(path, "found")
        else:
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        self._file = CatalogFile(path)
        self._file.keep_folder(replace(self._folder, has_all_blocks=False))
        self._on_lost()
