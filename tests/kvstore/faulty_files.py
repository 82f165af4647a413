"""Files in which things go wrong when a test asks for it."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

from kvstore.tiers.file_io import DIRECT_FLAG, OsFileIO, libc_fallocate

if TYPE_CHECKING:
    from collections.abc import Sequence


class FaultyFiles(OsFileIO):
    """The operating system's files, and what is set here on top.

    `errors`: errno that every call of that name raises. `bad`: bytes [start, end) of any file say EIO. `most`: bytes
    that one call moves. `interrupts`: that many calls are interrupted first. `flips`: a bit of what is read next is
    wrong, so often. `hang` makes calls of a name wait until `release`; `reached` counts those that wait.
    """

    def __init__(self) -> None:
        super().__init__(libc_fallocate())
        self.errors: dict[str, int] = {}
        self.bad = range(0)
        self.most: int | None = None
        self.interrupts = 0
        self.flips = 0
        self.direct_reads_wrong = False
        self.calls: Counter[str] = Counter()
        self.open_files: set[int] = set()
        self.most_open = 0
        self.reached = threading.Semaphore(0)
        self._hanging: dict[str, threading.Event] = {}
        self._direct: set[int] = set()

    def hang(self, name: str) -> None:
        self._hanging[name] = threading.Event()

    def release(self) -> None:
        """Let all that hangs go on; nothing hangs from now on."""
        hanging, self._hanging = self._hanging, {}
        for event in hanging.values():
            event.set()

    def open(self, path: str, flags: int) -> int:
        self._enter("open direct" if flags & DIRECT_FLAG else "open")
        if flags & (os.O_RDWR | os.O_CREAT):
            self._enter("open for writing")
        fd = super().open(path, flags)
        self.open_files.add(fd)
        self.most_open = max(self.most_open, len(self.open_files))
        if flags & DIRECT_FLAG:
            self._direct.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.open_files.remove(fd)
        self._direct.discard(fd)
        super().close(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._enter("read", buffers, offset)
        moved = super().read(fd, self._few(buffers), offset)
        if moved and (self.flips or (self.direct_reads_wrong and fd in self._direct)):
            self.flips = max(0, self.flips - 1)
            buffers[-1][-1] ^= 1
        return moved

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._enter("write", buffers, offset)
        return super().write(fd, self._few(buffers), offset)

    def resize(self, fd: int, size: int) -> None:
        self._enter("resize")
        super().resize(fd, size)

    def zero(self, fd: int, offset: int, length: int) -> None:
        self._enter("zero")
        super().zero(fd, offset, length)

    def _enter(self, name: str, buffers: Sequence[memoryview] = (), offset: int = 0) -> None:
        self.calls[name] += 1
        if name in self._hanging:
            event = self._hanging[name]
            self.reached.release()
            event.wait()
        if name in ("read", "write") and self.interrupts:
            self.interrupts -= 1
            raise InterruptedError(errno.EINTR, "interrupted")
        end = offset + sum(map(len, buffers))
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))
        if self.bad and offset < self.bad.stop and end > self.bad.start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _few(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """The first `most` bytes of `buffers`."""
        few: list[memoryview] = []
        left = sum(map(len, buffers)) if self.most is None else self.most
        for buffer in buffers:
            few.append(buffer[:left])
            left -= len(few[-1])
        return [buffer for buffer in few if len(buffer)]
