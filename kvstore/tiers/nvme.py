"""Slots in files: each one a header that says which block it is, and the block as it lies in memory.

A block is written header first, in one positional call straight from host memory, and read back the same way;
neighbours on the disk go in one call. Nothing that is read counts before header, key and digest agree. So no order of
writes and no fsync is needed: what a crash has torn is a miss.

    written whole, asked for by its key       DONE
    a sound header of another block, or none  STALE         the slot was used again, or erased, or never written
    a sound header of another model           OTHER_MODEL   a file that came from elsewhere
    a header of another version               OTHER_FORMAT
    anything else that can be read            CORRUPT       torn, flipped, cut short
    EIO                                       SLOT_BROKEN
    any other error: ENOSPC, EROFS, ...       FAILED        says nothing of what lies in the slot
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

import xxhash

from kvstore.codec import HEADER_BYTES, HeaderFault, SlotHeader, model_mark, unpack
from kvstore.errors import SettingInvalid
from kvstore.events import TransferEnd
from kvstore.tiers.base import Landed, Run
from kvstore.tiers.file_io import DIRECT_FLAG, FileIO, os_files, read_whole, write_whole
from kvstore.tiers.segments import SEGMENT_BYTES, SegmentGone, Segments
from kvstore.types import SLOT_ALIGNMENT, Tier

if TYPE_CHECKING:
    from kvstore.nvme_dir import ModelFolder
    from kvstore.types import BlockKey

log = logging.getLogger(__name__)

DIR_FLAG: Final = "--nvme-dir"
IO_FLAG: Final = "--nvme-io"

IoMode = Literal["auto", "direct", "buffered"]

PIECE_BYTES: Final = 8 * 1024 * 1024
"""Moved in one call at most: some milliseconds, the longest that a cancelled run goes on."""

PIECE_BLOCKS: Final = 64
"""And at most so many blocks: two buffers each, of the 1,024 that one call takes."""

_Once = Callable[[Run, Sequence[memoryview], int, int], Landed]


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that a header tells of; `first_block` is how many its chain has before it."""

    slot: int
    key: BlockKey
    parent: BlockKey | None
    first_block: int


def stride_bytes(slot_bytes: int) -> int:
    """What a slot with a payload of `slot_bytes` takes on the disk: the planner has that share of the quota to give."""
    return HEADER_BYTES + slot_bytes


class NvmeStore:
    """`num_slots` slots for blocks of `block_tokens` tokens, in files under `folder`; takes and gives any thread.

    `make_room(bytes)` is asked before a file grows by so much, and may say no (kvstore.nvme_dir). It may block: it is
    called on the threads of copies.
    """

    def __init__(
        self,
        folder: ModelFolder,
        num_slots: int,
        slot_bytes: int,
        *,
        block_tokens: int,
        make_room: Callable[[int], bool],
        io: IoMode = "auto",
        files: FileIO | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        assert slot_bytes % SLOT_ALIGNMENT == 0, "direct IO works in pages"
        self.tier = Tier.NVME
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.io = io
        self.bytes_read = 0
        self.bytes_written = 0
        self.before_write: Callable[[Sequence[int]], object] = lambda _slots: None
        """Called on a copy's thread with the slots that are about to be written to; it may block."""
        self._folder = folder
        self._block_tokens = block_tokens
        self._stride = stride_bytes(slot_bytes)
        self._model = model_mark(folder.model_key)
        self._files = files or os_files()
        self._segments = Segments(
            folder.slabs,
            num_slots,
            self._stride,
            files=self._files,
            make_room=make_room,
            make_folder=folder.make,
            segment_bytes=segment_bytes,
        )
        self._make_room = make_room
        self._pages = _Pages()
        self._counting = threading.Lock()
        self._told: dict[str, int | None] = {}  # errno by what failed with it since it last went well

    def __repr__(self) -> str:
        return f"<NvmeStore {self.slots_made}/{self.num_slots} slots of {self.slot_bytes} bytes, {self.io}>"

    @property
    def slots_made(self) -> int:
        """Slots that have a place on the disk by now."""
        return self._segments.num_slots_made

    @property
    def bytes_on_disk(self) -> int:
        """Of all files, written or not."""
        return self._segments.bytes_on_disk

    def open(self) -> None:
        """Take over what an earlier run left, and find out how this file system is best read; `io` then says it.

        Raises:
            SettingInvalid: the folder cannot be used; names --nvme-dir, or --nvme-io where direct IO cannot be had.
        """
        try:
            self._folder.make()
            self._segments.adopt()
            self._make_room(0)  # a smaller quota may be over already; who gives way is not for us to say
            self.io = self._found_mode()
        except OSError as exc:
            raise SettingInvalid(DIR_FLAG, f"{self._folder.path} cannot be used: {exc}") from exc
        self._segments.flags = self._flags(self.io)

    @property
    def faults(self) -> tuple[str, ...]:
        """What last failed and has not gone well since, in words."""
        return tuple(f"{what}: {os.strerror(code)}" for what, code in list(self._told.items()) if code is not None)

    def close(self) -> None:
        """Close the files; those that a hung copy still uses stay open as long as it does."""
        self._segments.close()

    def probe(self) -> bool:
        """Write a page beside the slabs and read it back: can this folder be used now? Blocking."""
        try:
            self._folder.make()
            is_sound = self._round_trip(self._flags(self.io))
        except OSError as exc:
            self._tell("probing", exc)
            return False
        if is_sound:
            self._told.clear()
        return is_sound

    # --- blocks -------------------------------------------------------------------------------

    def copy_in(self, run: Run) -> Landed:
        """From `run.host` to the disk; what is sound can be read back, also by the next process."""
        self.before_write(run.slots)
        return self._copy(run, self._write)

    def copy_out(self, run: Run) -> Landed:
        """From the disk into `run.host`; what is sound is what was written under its key, bit for bit."""
        return self._copy(run, self._read)

    def _copy(self, run: Run, once: _Once) -> Landed:
        assert run.host.slot_bytes == self.slot_bytes
        self._check(run.slots)
        payloads = [run.host.view(slot) for slot in run.host_slots]
        for first, count in self._pieces(run.slots):
            if run.is_cancelled():
                return Landed(first, TransferEnd.CANCELLED)
            landed = once(run, payloads, first, count)
            if landed.reason is TransferEnd.SLOT_BROKEN and count > 1:
                landed = _one_by_one(run, payloads, first, count, once)
            if landed.reason is not TransferEnd.DONE:
                return Landed(first + landed.good, landed.reason)
        return Landed(len(run.slots))

    def _write(self, run: Run, payloads: Sequence[memoryview], first: int, count: int) -> Landed:
        """Write blocks [first, first + count) of a run, which are neighbours on the disk."""
        segment, offset = self._segments.place(run.slots[first])
        with self._pages.borrow(count) as pages:
            for place, page in enumerate(pages, start=first):
                page[:] = self._header(run, place, payloads[place]).pack()
            buffers = _side_by_side(pages, payloads[first : first + count])
            try:
                with self._segments.writing(segment) as fd:
                    return self._pass(write_whole, fd, buffers, offset)
            except OSError as exc:
                self._tell("making room for blocks", exc)
                return Landed(0, TransferEnd.FAILED)

    def _read(self, run: Run, payloads: Sequence[memoryview], first: int, count: int) -> Landed:
        """Read blocks [first, first + count) of a run, which are neighbours on the disk."""
        segment, offset = self._segments.place(run.slots[first])
        with self._pages.borrow(count) as pages:
            buffers = _side_by_side(pages, payloads[first : first + count])
            try:
                with self._segments.reading(segment) as fd:
                    landed = self._pass(read_whole, fd, buffers, offset)
            except SegmentGone:
                return Landed(0, TransferEnd.STALE)
            except OSError as exc:
                self._tell("opening a file of blocks", exc)
                return Landed(0, TransferEnd.FAILED)
            for place in range(landed.good):
                header = self._wanted(pages[place], run.keys[first + place])
                if not isinstance(header, SlotHeader):
                    return Landed(place, header)
                if header.payload_digest != xxhash.xxh3_128_digest(payloads[first + place]):
                    return Landed(place, TransferEnd.CORRUPT)
        return landed

    def _pass(
        self,
        whole: Callable[[FileIO, int, Sequence[memoryview], int], int],
        fd: int,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> Landed:
        """Move whole blocks; how many went, and why no more."""
        is_write = whole is write_whole
        what = "writing blocks" if is_write else "reading blocks"
        try:
            moved = whole(self._files, fd, buffers, offset)
        except OSError as exc:
            self._tell(what, exc)
            return Landed(0, TransferEnd.SLOT_BROKEN if exc.errno == errno.EIO else TransferEnd.FAILED)
        # Whatever opened the file before went well, too.
        for past in (what, "making room for blocks" if is_write else "opening a file of blocks"):
            self._told.pop(past, None)
        with self._counting:
            self.bytes_written += moved if is_write else 0
            self.bytes_read += 0 if is_write else moved
        good = moved // self._stride
        if good == len(buffers) // 2:
            return Landed(good)
        # No byte more is taken, or given: the disk is full, or the file ends before the block does.
        return Landed(good, TransferEnd.FAILED if is_write else TransferEnd.CORRUPT)

    def _header(self, run: Run, place: int, payload: memoryview) -> SlotHeader:
        key = run.keys[place]
        is_known = key is not None
        parent = run.keys[place - 1] if place else run.parent
        return SlotHeader(
            model=self._model,
            key=key,
            parent=parent if is_known else None,
            first_token=(run.first_block + place) * self._block_tokens if is_known else 0,
            token_count=self._block_tokens,
            payload_bytes=self.slot_bytes,
            payload_digest=xxhash.xxh3_128_digest(payload),
        )

    def _ours(self, page: memoryview) -> SlotHeader | TransferEnd:
        """The header of a block as this store writes them, or why it is none."""
        header = unpack(page)
        if header is HeaderFault.BLANK:
            return TransferEnd.STALE
        if header is HeaderFault.OTHER_FORMAT:
            return TransferEnd.OTHER_FORMAT
        if not isinstance(header, SlotHeader):
            return TransferEnd.CORRUPT
        if header.model != self._model:
            return TransferEnd.OTHER_MODEL
        fits = header.payload_bytes == self.slot_bytes and header.token_count == self._block_tokens
        return header if fits else TransferEnd.CORRUPT

    def _wanted(self, page: memoryview, key: BlockKey | None) -> SlotHeader | TransferEnd:
        """The header of the block of `key`, or why it is none."""
        header = self._ours(page)
        if isinstance(header, SlotHeader) and header.key != key:
            return TransferEnd.STALE
        return header

    def _pieces(self, slots: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Cut a run into (first, count) such that slots [first, first + count) are neighbours in one file."""
        longest = max(1, min(PIECE_BYTES // self._stride, PIECE_BLOCKS))
        first = 0
        for place, (slot, following) in enumerate(pairwise(slots), start=1):
            is_cut = following != slot + 1 or self._segments.place(following)[1] == 0
            if is_cut or place - first == longest:
                yield first, place - first
                first = place
        if slots:
            yield first, len(slots) - first

    def _check(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise IndexError(f"{self!r} has no slot {slot}")

    # --- for upkeep ---------------------------------------------------------------------------

    def scan(self) -> Iterator[FoundBlock]:
        """Blocks that headers tell of, each key once; private ones are left out. Blocking, one small read per slot.

        Payloads are not read: a torn one is found here and missed when it is read.
        """
        seen: set[BlockKey] = set()
        for slot in self._segments.slots_made():
            header = self._header_of(slot)
            if header is not None and header.key is not None and header.key not in seen:
                seen.add(header.key)
                yield FoundBlock(slot, header.key, header.parent, header.first_token // self._block_tokens)

    def verify(self, slot: int, key: BlockKey | None) -> TransferEnd:
        """How a copy of `slot`, asked for as the block of `key`, would end; reads all of it. Blocking."""
        self._check((slot,))
        segment, _ = self._segments.place(slot)
        with self._pages.borrow(PIECE_BLOCKS) as pages:
            try:
                with self._segments.reading(segment) as fd:
                    return self._verify(slot, key, fd, pages)
            except SegmentGone:
                return TransferEnd.STALE
            except OSError as exc:
                self._tell("verifying blocks", exc)
                return TransferEnd.SLOT_BROKEN if exc.errno == errno.EIO else TransferEnd.FAILED

    def erase(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Leave no byte of `slots` in the files; returns once that would survive a loss of power. Blocking.

        Returns those that may still be there: the medium fails. Nothing may be reading or writing any of them.
        """
        by_segment: dict[int, list[tuple[int, int]]] = {}
        for slot in slots:
            self._check((slot,))
            segment, offset = self._segments.place(slot)
            by_segment.setdefault(segment, []).append((slot, offset))
        failed: list[int] = []
        for segment, places in by_segment.items():
            try:
                with self._segments.reading(segment, writable=True) as fd:
                    for _, offset in places:
                        self._files.zero(fd, offset, self._stride)
                    self._files.sync(fd)
            except SegmentGone:
                continue
            except OSError as exc:
                self._tell("erasing blocks", exc)
                failed += [slot for slot, _ in places]
        return tuple(failed)

    def _header_of(self, slot: int) -> SlotHeader | None:
        segment, offset = self._segments.place(slot)
        with self._pages.borrow(1) as pages:
            try:
                with self._segments.reading(segment) as fd:
                    if read_whole(self._files, fd, pages, offset) < HEADER_BYTES:
                        return None
            except SegmentGone:
                return None
            except OSError as exc:
                self._tell("reading headers", exc)
                return None
            header = self._ours(pages[0])
        return header if isinstance(header, SlotHeader) else None

    def _verify(self, slot: int, key: BlockKey | None, fd: int, pages: list[memoryview]) -> TransferEnd:
        _, offset = self._segments.place(slot)
        if read_whole(self._files, fd, pages[:1], offset) < HEADER_BYTES:
            return TransferEnd.CORRUPT
        header = self._wanted(pages[0], key)
        if not isinstance(header, SlotHeader):
            return header
        digest, end = xxhash.xxh3_128(), offset + self._stride
        for start in range(offset + HEADER_BYTES, end, len(pages) * HEADER_BYTES):
            wanted = pages[: (end - start) // HEADER_BYTES]
            if read_whole(self._files, fd, wanted, start) < len(wanted) * HEADER_BYTES:
                return TransferEnd.CORRUPT
            for page in wanted:
                digest.update(page)
        return TransferEnd.DONE if digest.digest() == header.payload_digest else TransferEnd.CORRUPT

    # --- the file system ----------------------------------------------------------------------

    def _flags(self, io: IoMode) -> int:
        return DIRECT_FLAG if io == "direct" else 0

    def _found_mode(self) -> IoMode:
        if self.io != "buffered":
            problem = "this system has no such thing"
            try:
                if DIRECT_FLAG and self._round_trip(DIRECT_FLAG):
                    return "direct"
            except OSError as exc:
                problem = str(exc)
            if self.io == "direct":
                raise SettingInvalid(IO_FLAG, f"{self._folder.path} cannot be read directly ({problem}); use auto")
        if not self._round_trip(0):
            raise OSError(errno.EIO, "what was written to a file could not be read back")
        return "buffered"

    def _round_trip(self, flags: int) -> bool:
        """Does a page come back as it was written?

        Raises:
            OSError: the file system does not take `flags`, or nothing at all.
        """
        path = str(self._folder.probe)
        with self._pages.borrow(2) as pages:
            pages[0][:] = os.urandom(HEADER_BYTES)
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT | flags)
            try:
                written = write_whole(self._files, fd, pages[:1], 0)
                self._files.sync(fd)
                return written == HEADER_BYTES == read_whole(self._files, fd, pages[1:], 0) and pages[0] == pages[1]
            finally:
                self._files.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _tell(self, what: str, exc: OSError) -> None:
        """Log what is new: a dead disk has the same to say of every block."""
        if self._told.get(what) != exc.errno:
            self._told[what] = exc.errno
            log.warning("%s under %s: %s", what, self._folder.path, exc)


class _Pages:
    """Pages for headers, on page boundaries, used again and again."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, count: int) -> Iterator[list[memoryview]]:
        """`count` pages of HEADER_BYTES, PIECE_BLOCKS at most, as long as the block lasts."""
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = memoryview(mmap.mmap(-1, PIECE_BLOCKS * HEADER_BYTES))
        try:
            yield [memory[place * HEADER_BYTES : (place + 1) * HEADER_BYTES] for place in range(count)]
        finally:
            with self._lock:
                self._free.append(memory)


def _side_by_side(pages: Sequence[memoryview], payloads: Sequence[memoryview]) -> list[memoryview]:
    """Header, payload, header, payload, ...: as they lie on the disk."""
    return [buffer for pair in zip(pages, payloads, strict=True) for buffer in pair]


def _one_by_one(run: Run, payloads: Sequence[memoryview], first: int, count: int, once: _Once) -> Landed:
    """The same copy block by block, since one of several is broken: which?"""
    for place in range(count):
        landed = once(run, payloads, first + place, 1)
        if landed.reason is not TransferEnd.DONE:
            return Landed(place, landed.reason)
    return Landed(count)
