"""Files of slots in one folder, each made when one of its slots is first written.

    0000.kv  [ slot 0 | slot 1 | ... | slot n - 1 ]        n = as many as fit into 256 MiB
    0001.kv  [ slot n | ...                       ]
    ...
    the last may be smaller: it ends where the quota does

A file that is deleted or cut short under us is missed when it is next used; writing makes it anew. For any number of
threads. Whatever may hang in a dead disk is done without `_lock`; only what makes a file waits for `_making`, which no
reader takes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.tiers.file_io import FileIO

log = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 256 * 1024 * 1024
MOST_OPEN: Final = 64
"""Files kept open at most; a terabyte has four thousand, and a process often may have 1,024 in all."""

SEGMENT_NAME = re.compile(r"\d{4,}\.kv")
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class SegmentGone(Exception):
    """The file is not there while its folder is: what it held will not come back."""


class _Handle:
    """One open file. Closed by its last user once it is retired, never under one."""

    def __init__(self, fd: int, is_writable: bool) -> None:
        self.fd = fd
        self.is_writable = is_writable
        self.users = 1
        self.is_retired = False


class Segments:
    """`num_slots` slots of `stride` bytes in files under `slabs`.

    `flags` are added when a file is opened. `make_room` is asked for the bytes of every file before it is made, and for
    none before one that took the place of a deleted one is written; `make_folder` makes `slabs` where it is missing.
    """

    def __init__(
        self,
        slabs: Path,
        num_slots: int,
        stride: int,
        *,
        files: FileIO,
        make_room: Callable[[int], bool],
        make_folder: Callable[[], None],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.flags = 0
        self._slabs = slabs
        self._num_slots = num_slots
        self._stride = stride
        self._per_segment = max(1, segment_bytes // stride)
        self._files = files
        self._make_room = make_room
        self._make_folder = make_folder
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._open: OrderedDict[int, _Handle] = OrderedDict()  # least recently used first

    @property
    def num_slots_made(self) -> int:
        """Slots that lie in files there are."""
        with self._lock:
            return sum(size // self._stride for size in self._sizes.values())

    @property
    def bytes_on_disk(self) -> int:
        """Of all files there are, written or not."""
        with self._lock:
            return sum(self._sizes.values())

    def place(self, slot: int) -> tuple[int, int]:
        """Number of the segment that `slot` lies in, and where it begins in there."""
        segment, index = divmod(slot, self._per_segment)
        return segment, index * self._stride

    def slots_made(self) -> Iterator[int]:
        """Numbers of the slots that lie in files there are, in order."""
        with self._lock:
            sizes = sorted(self._sizes.items())
        for segment, size in sizes:
            first = segment * self._per_segment
            yield from range(first, first + size // self._stride)

    def adopt(self) -> None:
        """Take over the files of an earlier run; what lies beyond `num_slots` is cut off: the quota is smaller now.

        Raises:
            OSError: the folder cannot be read, or a file not be cut.
        """
        with os.scandir(self._slabs) as entries:
            found = [entry.name for entry in entries if _is_segment(entry)]
        for name in found:
            segment, path = int(name[:-3]), self._slabs / name
            size, most = path.stat().st_size, self._size(segment)
            if most == 0:
                path.unlink()
                continue
            if size > most:
                os.truncate(path, most)
            self._sizes[segment] = min(size, most)

    @contextmanager
    def reading(self, segment: int, *, writable: bool = False) -> Iterator[int]:
        """The file's descriptor, open as long as the block lasts; `writable` to change what is there, too.

        Raises:
            SegmentGone: there is no such file, or no longer.
            OSError: the medium says so.
        """
        if segment not in self._sizes:
            raise SegmentGone(segment)
        try:
            handle, status = self._take_live(segment, writable=writable)
        except FileNotFoundError as exc:
            if not self._slabs.is_dir():
                raise
            with self._lock:
                self._sizes.pop(segment, None)
            raise SegmentGone(segment) from exc
        if status.st_size < self._sizes.get(segment, 0):
            with self._lock:
                self._sizes[segment] = status.st_size
        try:
            yield handle.fd
        finally:
            self._give_back(handle)

    @contextmanager
    def writing(self, segment: int) -> Iterator[int]:
        """The same for a file of full length, which is made where it is missing.

        Raises:
            OSError: the medium says so; EDQUOT: there is no room for the file.
        """
        handle = self._take_full(segment)
        if handle is None:
            with self._making:
                handle = self._take_full(segment)
                if handle is None:
                    self._make(segment)
                    handle, _ = self._take_live(segment, writable=True)
        try:
            yield handle.fd
        finally:
            self._give_back(handle)

    def close(self) -> None:
        """Close the files that nobody uses; the others are closed by their last user."""
        with self._lock:
            handles = list(self._open.values())
            self._open.clear()
            idle = self._retire(handles)
        self._close(idle)

    def _size(self, segment: int) -> int:
        """Bytes of a whole segment; 0 beyond the last one."""
        first = segment * self._per_segment
        return max(0, min(self._per_segment, self._num_slots - first)) * self._stride

    def _path(self, segment: int) -> str:
        return str(self._slabs / f"{segment:04d}.kv")

    # --- making -------------------------------------------------------------------------------

    def _take_full(self, segment: int) -> _Handle | None:
        """Its handle, unless the file is missing or too short."""
        try:
            handle, status = self._take_live(segment, writable=True)
        except FileNotFoundError:
            return None
        if status.st_size >= self._size(segment):
            return handle
        self._give_back(handle)
        return None

    def _make(self, segment: int) -> None:
        """Make the file, or make it as long as it should be. The caller has `_making`."""
        path, size = self._path(segment), self._size(segment)
        former = os.path.getsize(path) if os.path.exists(path) else 0
        self._ask_for(size - former)
        self._make_folder()
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | self.flags)
        try:
            self._files.resize(fd, size)
        except OSError:
            # Half a file would count against the quota and hold nothing.
            with contextlib.suppress(OSError):
                self._files.resize(fd, former) if former else os.unlink(path)
            raise
        finally:
            self._files.close(fd)
        with self._lock:
            self._sizes[segment] = size

    def _ask_for(self, size: int) -> None:
        if not self._make_room(size):
            raise OSError(errno.EDQUOT, "neither the quota nor the disk's free space has room for blocks")

    # --- open files ---------------------------------------------------------------------------

    def _take_live(self, segment: int, *, writable: bool) -> tuple[_Handle, os.stat_result]:
        """A handle of the file that has the segment's name now, for one user more."""
        while True:
            handle = self._take(segment, writable)
            status = self._status(handle)
            if status.st_nlink:
                return handle, status
            self._drop(segment, handle)  # deleted: what we write there nobody would find
            if writable:
                self._ask_for(0)  # what has its name now may be another server's

    def _status(self, handle: _Handle) -> os.stat_result:
        try:
            return self._files.status(handle.fd)
        except OSError:
            self._give_back(handle)
            raise

    def _take(self, segment: int, writable: bool) -> _Handle:
        with self._lock:
            handle = self._usable(segment, writable)
        if handle is not None:
            return handle
        opened = self._open_file(segment, writable)
        with self._lock:
            # Another thread may have been as fast: one file, one handle.
            handle = self._usable(segment, writable)
            if handle is None:
                handle = opened
                idle = self._retire([self._open.pop(segment)] if segment in self._open else [])
                self._open[segment] = handle
                while len(self._open) > MOST_OPEN:
                    idle += self._retire([self._open.popitem(last=False)[1]])
            else:
                opened.users = 0
                idle = [opened]
        self._close(idle)
        return handle

    def _usable(self, segment: int, writable: bool) -> _Handle | None:
        handle = self._open.get(segment)
        if handle is None or (writable and not handle.is_writable):
            return None
        handle.users += 1
        self._open.move_to_end(segment)
        return handle

    def _open_file(self, segment: int, writable: bool) -> _Handle:
        path = self._path(segment)
        try:
            return _Handle(self._files.open(path, os.O_RDWR | self.flags), True)
        except OSError as exc:
            if writable or exc.errno not in _READ_ONLY:
                raise
        return _Handle(self._files.open(path, os.O_RDONLY | self.flags), False)

    def _drop(self, segment: int, handle: _Handle) -> None:
        with self._lock:
            if self._open.get(segment) is handle:
                del self._open[segment]
            handle.is_retired = True
        self._give_back(handle)

    def _give_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            is_last = handle.is_retired and handle.users == 0
        if is_last:
            self._close([handle])

    def _retire(self, handles: list[_Handle]) -> list[_Handle]:
        """No one may take them any more; those that can be closed at once."""
        for handle in handles:
            handle.is_retired = True
        return [handle for handle in handles if handle.users == 0]

    def _close(self, handles: list[_Handle]) -> None:
        for handle in handles:
            try:
                self._files.close(handle.fd)
            except OSError as exc:
                log.warning("closing a file under %s: %s", self._slabs, exc)


def _is_segment(entry: os.DirEntry[str]) -> bool:
    """Ours by name, and a plain file: nothing else is ever opened, cut or removed."""
    named = SEGMENT_NAME.fullmatch(entry.name) is not None and entry.name == f"{int(entry.name[:-3]):04d}.kv"
    return named and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
