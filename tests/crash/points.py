"""Where a process is to be killed, and the seams that bring it there.

    anywhere   after some milliseconds under load, whatever it does then
    write      in the middle of a pwritev of slots: some of its bytes are in the file, the others never come
    read       in the middle of a wake: a read of slots has begun and does not end
    zero       in the middle of an erasure, which has reached some bytes of a slot
    resize     a file of slots is made and not yet of its length
    commit     some microseconds after the catalog's COMMIT was begun
    drain      some milliseconds after the drain was
    drain write  as write, for what only the drain writes

Every write and every erasure of slots is noted in a file before it begins and after it ended: what a killed process
may have left half done is then known, and nothing else may be broken.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvstore.codec import HEADER_BYTES, SlotHeader, unpack
from kvstore.tiers.file_io import DIRECT_FLAG, OsFileIO, libc_fallocate
from kvstore.tiers.segments import SEGMENT_NAME
from kvstore.types import SLOT_ALIGNMENT

POINTS = ("anywhere", "write", "read", "zero", "resize", "commit", "drain", "drain write")


@dataclass(frozen=True, slots=True)
class Plan:
    """At which of the calls, counted from 1; how much of it is done first; how long after it the kill comes."""

    point: str
    call: int = 1
    share: float = 0.5
    seconds: float = 0.0


class Fuse:
    """Counts calls and says so when the planned one has come: `tell` is given the point's name."""

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.is_armed = False
        self.is_draining = False
        self._tell = tell
        self._calls = 0
        self._lock = threading.Lock()

    def is_due(self, call: str) -> bool:
        """Is this call of that name the one?"""
        wanted = call if not (call == "write" and self.is_draining) else "drain write"
        if not self.is_armed or self.plan.point != wanted:
            return False
        with self._lock:
            self._calls += 1
            return self._calls == self.plan.call

    def stop_here(self) -> NoReturn:
        """Tell, and do nothing more on this thread: the kill is on its way."""
        self._tell(self.plan.point)
        while True:
            time.sleep(60.0)


class CrashingFiles(OsFileIO):
    """The operating system's files, up to the planned point; `journal` is the file of notes."""

    def __init__(self, fuse: Fuse, journal: Path, segment_bytes: int) -> None:
        super().__init__(libc_fallocate())
        self._fuse = fuse
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._segment_bytes = segment_bytes
        self._number: dict[int, int] = {}  # of a file of slots, by descriptor
        self._direct: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        name = Path(path).name
        self._number.pop(fd, None)
        self._direct.discard(fd)
        if SEGMENT_NAME.fullmatch(name):
            self._number[fd] = int(name[:-3])
        if flags & DIRECT_FLAG:
            self._direct.add(fd)
        return fd

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in self._number and self._fuse.is_due("read"):
            super().read(fd, self._share(fd, buffers), offset)
            self._fuse.stop_here()
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd not in self._number:
            return super().write(fd, buffers, offset)
        blocks = self._blocks(fd, buffers, offset)
        self._note("write", blocks)
        if self._fuse.is_due("write"):
            super().write(fd, self._share(fd, buffers), offset)
            self._fuse.stop_here()
        moved = super().write(fd, buffers, offset)
        if moved == sum(map(len, buffers)):
            self._note("written", blocks)
        return moved

    def resize(self, fd: int, size: int) -> None:
        if fd in self._number and self._fuse.is_due("resize"):
            if self._fuse.plan.share < 0.5:
                super().resize(fd, int(size * self._fuse.plan.share))
            self._fuse.stop_here()
        super().resize(fd, size)

    def zero(self, fd: int, offset: int, length: int) -> None:
        blocks = [(self._slot(fd, offset, length), "")]
        self._note("write", blocks)
        if self._fuse.is_due("zero"):
            part = int(length * self._fuse.plan.share)
            super().zero(fd, offset, part - part % SLOT_ALIGNMENT)
            self._fuse.stop_here()
        super().zero(fd, offset, length)
        self._note("written", blocks)

    def _blocks(self, fd: int, buffers: Sequence[memoryview], offset: int) -> list[tuple[int, str]]:
        """Slots that a write goes to, with the keys of what it brings; "" for none."""
        if len(buffers[0]) != HEADER_BYTES:
            return []  # the rest of a write that was cut short
        first = self._slot(fd, offset, len(buffers[0]) + len(buffers[1]))
        found = []
        for place, page in enumerate(buffers[::2]):
            header = unpack(page)
            key = header.key if isinstance(header, SlotHeader) else None
            found.append((first + place, "" if key is None else key.hex()))
        return found

    def _slot(self, fd: int, offset: int, stride: int) -> int:
        return self._number[fd] * (self._segment_bytes // stride) + offset // stride

    def _note(self, what: str, blocks: list[tuple[int, str]]) -> None:
        os.write(self._journal, (json.dumps([what, blocks]) + "\n").encode())

    def _share(self, fd: int, buffers: Sequence[memoryview]) -> list[memoryview]:
        """The planned share of what `buffers` hold; whole pages where the file wants them."""
        left = int(sum(map(len, buffers)) * self._fuse.plan.share)
        left -= left % SLOT_ALIGNMENT if fd in self._direct else 0
        some = []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        return [buffer for buffer in some if len(buffer)]


def kill_in_commits(fuse: Fuse) -> None:
    """From now on the planned COMMIT of the catalog's thread is this process's end, `plan.seconds` later.

    By a signal of its own: a parent that is told takes longer than the commit does.
    """

    def on_statement(statement: str) -> None:
        is_commit = statement == "COMMIT" and threading.current_thread().name == "catalog"
        if is_commit and fuse.is_due("commit"):
            threading.Thread(target=_end, args=(time.perf_counter() + fuse.plan.seconds,), daemon=True).start()

    class Traced(sqlite3.Connection):
        """Says each statement before it runs."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.set_trace_callback(on_statement)

    # The catalog has no seam for this and needs none: it is the library that is listened to, in a process of its own.
    sqlite3.connect = functools.partial(sqlite3.connect, factory=Traced)  # type: ignore[assignment]


def _end(at: float) -> None:
    while time.perf_counter() < at:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def note_erased(journal: Path, slots: Iterable[int]) -> None:
    """Nothing is in these slots, by another hand than the store's."""
    with journal.open("a") as notes:
        notes.write(json.dumps(["written", [(slot, "") for slot in slots]]) + "\n")


class Ledger:
    """The notes of all processes that a directory had."""

    def __init__(self, journal: Path) -> None:
        self.under_way: dict[int, str] = {}  # slots whose last write, or erasure, was not seen to end, with its key
        self.holds: dict[int, str] = {}  # what the last one that ended left there
        self.once: set[tuple[int, str]] = set()  # all that was ever whole
        lines = journal.read_text().splitlines() if journal.exists() else []
        for line in lines:
            what, blocks = json.loads(line)
            for slot, key in blocks:
                if what == "write":
                    self.under_way[slot] = key
                else:
                    self.under_way.pop(slot, None)
                    self.holds[slot] = key
                    self.once.add((slot, key))

    def may_be_broken(self, slot: int, key: str) -> bool:
        """May a slot that the catalog says holds `key` hold something else, or a part of it?

        Where it was given to another block and the catalog has not heard of that yet. Never because of `key`'s own
        first write: only what was written whole is catalogued.
        """
        is_other = slot in self.under_way or self.holds.get(slot) != key
        return is_other and (slot, key) in self.once
