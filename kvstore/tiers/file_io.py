"""The few calls by which slabs are read and written, as a seam: the operating system's, or a test's that fail.

Every call blocks and raises OSError for what a medium does. Buffers, offsets and lengths are multiples of 4,096 bytes
wherever a file was opened for direct IO.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.types import SLOT_ALIGNMENT

DIRECT_FLAG: int = getattr(os, "O_DIRECT", 0)
"""0 where there is no such thing (macOS)."""

_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 0x01, 0x02, 0x10  # linux/falloc.h
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_ZEROS_BYTES = 1024 * 1024


class FileIO(Protocol):
    def open(self, path: str, flags: int) -> int:
        """A descriptor; what is made has mode 0600."""

    def close(self, fd: int) -> None: ...

    def status(self, fd: int) -> os.stat_result: ...

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read into `buffers` from `offset` on; fewer than there is room for is no error, 0 is the file's end."""

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes of `buffers` written from `offset` on; fewer than there are is no error."""

    def resize(self, fd: int, size: int) -> None:
        """Make the file `size` bytes long; where the file system can, what is new is reserved on it.

        What is new reads as zeros.
        """

    def zero(self, fd: int, offset: int, length: int) -> None:
        """Make [offset, offset + length) of the file read as zeros, and forget the bytes that were there."""

    def sync(self, fd: int) -> None:
        """Return once what was written and zeroed would survive a loss of power."""


Fallocate = Callable[[int, int, int, int], int]
"""fallocate(2): descriptor, mode, offset, length -> 0, or an errno."""


@functools.cache
def libc_fallocate() -> Fallocate | None:
    """Linux's, if this is Linux."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        call = library.fallocate
    except AttributeError:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    return lambda fd, mode, offset, length: ctypes.get_errno() if call(fd, mode, offset, length) else 0


class OsFileIO:
    """The operating system's calls; `fallocate` None is one that cannot reserve room, nor give some back."""

    def __init__(self, fallocate: Fallocate | None = None) -> None:
        self._call = fallocate

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def status(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def resize(self, fd: int, size: int) -> None:
        # Not os.posix_fallocate: where the file system cannot reserve, glibc writes to every block instead.
        if size <= os.fstat(fd).st_size or not self._fallocate(fd, 0, 0, size):
            os.ftruncate(fd, size)

    def zero(self, fd: int, offset: int, length: int) -> None:
        # In this order: a zeroed range stays reserved, a hole may find no room when it is written again.
        if self._fallocate(fd, _ZERO_RANGE | _KEEP_SIZE, offset, length):
            return
        if not self._fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
            _write_zeros(fd, offset, length)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def _fallocate(self, fd: int, mode: int, offset: int, length: int) -> bool:
        """False where this system, or this file system, has no such thing."""
        if self._call is None:
            return False
        while code := self._call(fd, mode, offset, length):
            if code in _UNSUPPORTED:
                return False
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        return True


def os_files() -> OsFileIO:
    """This system's calls, with all that it can do."""
    return OsFileIO(libc_fallocate())


def _write_zeros(fd: int, offset: int, length: int) -> None:
    end = offset + length
    while offset < end:
        offset += os.pwrite(fd, _zeros()[: end - offset], offset)


@functools.cache
def _zeros() -> memoryview:
    """On a page's boundary, as direct IO wants it."""
    return memoryview(mmap.mmap(-1, _ZEROS_BYTES))


def read_whole(files: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` from `offset` on, in as many calls as it takes; bytes read, fewer only where the file ends.

    Raises:
        OSError: the medium fails; how much was read before is not known.
    """
    return _whole(files.read, fd, buffers, offset)


def write_whole(files: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write all of `buffers` from `offset` on, in as many calls as it takes; fewer bytes only where no more go.

    Raises:
        OSError: the medium fails, or is full; how much was written before is not known.
    """
    return _whole(files.write, fd, buffers, offset)


def _whole(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview], at: int
) -> int:
    left, done = list(buffers), 0
    while left:
        try:
            moved = call(fd, left, at + done)
        except InterruptedError:
            continue
        # Go on from a whole page: after part of one, direct IO refuses what follows as unaligned.
        whole = moved if moved == sum(map(len, left)) else moved - moved % SLOT_ALIGNMENT
        if whole == 0:
            break
        done += whole
        left = _after(left, whole)
    return done


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` behind their first `count` bytes."""
    for place, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[place + 1 :]]
        count -= len(buffer)
    return []
