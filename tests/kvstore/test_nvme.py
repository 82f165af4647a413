"""Slots in files: what stands in them, and every way in which a disk can let us down."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvstore.codec import FORMAT_VERSION, HEADER_BYTES, SlotHeader, model_mark, seal, unpack
from kvstore.errors import SettingInvalid
from kvstore.events import TransferEnd
from kvstore.nvme_dir import NvmeDirectory
from kvstore.tiers.base import Landed, Run
from kvstore.tiers.file_io import OsFileIO, libc_fallocate
from kvstore.tiers.nvme import FoundBlock, NvmeStore
from kvstore.tiers.segments import MOST_OPEN
from tests.kvstore.faulty_files import FaultyFiles
from tests.kvstore.stores import (
    BLOCK_TOKENS,
    SLOT_BYTES,
    STRIDE,
    chain_run,
    contents,
    fill,
    key,
    model_folder,
    nvme_store,
    run,
    slab,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.nvme_dir import ModelFolder
    from kvstore.tiers.dram import DramSlab

NUM_SLOTS = 10
PER_SEGMENT = 4
SMALL = {"segment_bytes": PER_SEGMENT * STRIDE}  # files of 4, 4 and 2 slots


@pytest.fixture
def host() -> Iterator[DramSlab]:
    made = slab(12)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return model_folder(tmp_path)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(folder: ModelFolder, files: FaultyFiles) -> Iterator[NvmeStore]:
    made = nvme_store(folder, NUM_SLOTS, files=files, **SMALL)
    yield made
    files.release()
    made.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvstore.tiers")


def segments(folder: ModelFolder) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.slabs.iterdir())}


# --- what lies where ----------------------------------------------------------------------


def test_files_are_made_when_they_are_first_written_and_the_last_ends_with_the_capacity(
    store: NvmeStore, folder: ModelFolder, host: DramSlab
) -> None:
    assert segments(folder) == {}
    store.copy_in(run((9,), host, (0,)))
    assert segments(folder) == {"0002.kv": 2 * STRIDE}
    store.copy_in(run((0, 1), host, (0, 1)))
    assert segments(folder) == {"0000.kv": 4 * STRIDE, "0002.kv": 2 * STRIDE}
    assert (store.slots_made, store.bytes_on_disk) == (6, 6 * STRIDE)
    assert repr(store) == "<NvmeStore 6/10 slots of 8192 bytes, buffered>"


def test_nobody_else_may_read_them(store: NvmeStore, folder: ModelFolder, host: DramSlab) -> None:
    former = os.umask(0)
    try:
        store.copy_in(run((0,), host, (0,)))
    finally:
        os.umask(former)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.rglob("*")}
    assert modes == {"slabs": 0o700, "model.json": 0o600, "0000.kv": 0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_slot_is_a_header_and_the_block_as_it_lies_in_memory(
    store: NvmeStore, folder: ModelFolder, host: DramSlab
) -> None:
    written = fill(host, (0, 1))
    store.copy_in(chain_run((2, 7), host, (0, 1), first_block=5))
    first = (folder.slabs / "0000.kv").read_bytes()[2 * STRIDE : 3 * STRIDE]
    second = (folder.slabs / "0001.kv").read_bytes()[3 * STRIDE :]
    assert [first[HEADER_BYTES:], second[HEADER_BYTES:]] == written
    header = unpack(first[:HEADER_BYTES])
    assert isinstance(header, SlotHeader)
    assert (header.key, header.parent) == (key(1005), key(1004))
    assert (header.first_token, header.token_count) == (5 * BLOCK_TOKENS, BLOCK_TOKENS)
    assert header.model == model_mark(folder.model_key)
    following = unpack(second[:HEADER_BYTES])
    assert isinstance(following, SlotHeader)
    assert (following.key, following.parent, following.first_token) == (key(1006), key(1005), 6 * BLOCK_TOKENS)


def test_neighbours_on_the_disk_go_in_one_call_wherever_they_lie_in_memory(
    store: NvmeStore, files: FaultyFiles, host: DramSlab
) -> None:
    files.calls.clear()
    store.copy_in(run((0, 1, 2, 3, 4, 7, 6), host, (9, 0, 5, 1, 2, 3, 4)))
    store.copy_out(run((0, 1, 2, 3, 4, 7, 6), host, (9, 0, 5, 1, 2, 3, 4)))
    assert (files.calls["write"], files.calls["read"]) == (4, 4), "0 to 3, and 4, in another file; 7; 6"


def test_what_moved_is_counted(store: NvmeStore, host: DramSlab) -> None:
    store.copy_in(run((0, 1, 5), host, (0, 1, 2)))
    store.copy_out(run((1,), host, (0,)))
    assert (store.bytes_written, store.bytes_read) == (3 * STRIDE, STRIDE)


def test_no_more_than_so_many_files_are_open_at_once(folder: ModelFolder, host: DramSlab) -> None:
    files = FaultyFiles()
    store = nvme_store(folder, MOST_OPEN + 20, files=files, segment_bytes=STRIDE)
    written = fill(host, (0,))
    for slot in range(store.num_slots):
        store.copy_in(run((slot,), host, (0,)))
    for slot in range(store.num_slots):
        assert store.copy_out(run((slot,), host, (1,))) == Landed(1)
    assert contents(host, (1,)) == written
    assert files.most_open <= MOST_OPEN + 1
    store.close()
    assert files.open_files == set()


# --- what is not the block asked for ------------------------------------------------------


def test_a_slot_of_another_block_is_stale_and_what_was_before_it_sound(store: NvmeStore, host: DramSlab) -> None:
    store.copy_in(chain_run((0, 1, 2), host, (0, 1, 2)))
    store.copy_in(chain_run((1,), host, (3,), chain=2))
    assert store.copy_out(chain_run((0, 1, 2), host, (4, 5, 6))) == Landed(1, TransferEnd.STALE)


def test_a_private_block_is_not_a_keyed_one_nor_the_other_way_round(store: NvmeStore, host: DramSlab) -> None:
    store.copy_in(run((0,), host, (0,)))
    store.copy_in(chain_run((1,), host, (0,)))
    assert store.copy_out(chain_run((0,), host, (1,))) == Landed(0, TransferEnd.STALE)
    assert store.copy_out(run((1,), host, (1,))) == Landed(0, TransferEnd.STALE)


def test_a_slot_that_was_never_written_is_stale_whether_its_file_is_there_or_not(
    store: NvmeStore, host: DramSlab
) -> None:
    assert store.copy_out(chain_run((5,), host, (0,))) == Landed(0, TransferEnd.STALE)
    store.copy_in(chain_run((4,), host, (0,)))
    assert store.copy_out(chain_run((5,), host, (0,))) == Landed(0, TransferEnd.STALE)


def test_a_flipped_byte_anywhere_in_a_slot_is_noticed(store: NvmeStore, folder: ModelFolder, host: DramSlab) -> None:
    fill(host, (0,))
    store.copy_in(chain_run((1,), host, (0,)))
    path = folder.slabs / "0000.kv"
    sound = path.read_bytes()
    for place in [*range(HEADER_BYTES), *range(HEADER_BYTES, STRIDE, 13)]:
        flipped = bytearray(sound[STRIDE : 2 * STRIDE])
        flipped[place] ^= 0x10
        with path.open("r+b") as file:
            file.seek(STRIDE)
            file.write(flipped)
        assert store.copy_out(chain_run((1,), host, (1,))) == Landed(0, TransferEnd.CORRUPT), place
        assert store.verify(1, key(1000)) is TransferEnd.CORRUPT
    path.write_bytes(sound)
    assert store.copy_out(chain_run((1,), host, (1,))) == Landed(1)


@pytest.mark.parametrize("over", ["nothing", "another block", "itself"])
def test_a_write_torn_anywhere_is_never_taken_for_the_block(
    store: NvmeStore, folder: ModelFolder, host: DramSlab, over: str
) -> None:
    fill(host, (0, 1))
    path = folder.slabs / "0000.kv"
    store.copy_in(chain_run((1,), host, (1,), chain=2))
    former = path.read_bytes()[STRIDE : 2 * STRIDE] if over == "another block" else bytes(STRIDE)
    store.copy_in(chain_run((1,), host, (0,)))
    fresh = path.read_bytes()[STRIDE : 2 * STRIDE]
    if over == "itself":
        # Equal keys, other bits: K/V depends on how rows were batched.
        store.copy_in(chain_run((1,), host, (1,)))
        former = path.read_bytes()[STRIDE : 2 * STRIDE]
    for torn in range(0, STRIDE + 1, 128):
        for mixed in (fresh[:torn] + former[torn:], former[:torn] + fresh[torn:]):
            with path.open("r+b") as file:
                file.seek(STRIDE)
                file.write(mixed)
            landed = store.copy_out(chain_run((1,), host, (2,)))
            assert landed.good == (mixed == fresh or (over == "itself" and mixed == former))
            assert store.verify(1, key(1000)) is landed.reason
            if landed.good:
                assert contents(host, (2,)) == [mixed[HEADER_BYTES:]]


def test_slots_of_another_models_folder_are_told_apart_and_not_found(
    store: NvmeStore, folder: ModelFolder, tmp_path: Path, host: DramSlab
) -> None:
    other_folder = model_folder(tmp_path, b"another model's.")
    other = nvme_store(other_folder, NUM_SLOTS, **SMALL)
    other.copy_in(chain_run((0, 1), host, (0, 1)))
    other.close()
    store.copy_in(chain_run((0, 1), host, (0, 1)))
    shutil.copy(other_folder.slabs / "0000.kv", folder.slabs / "0000.kv")
    assert store.copy_out(chain_run((0, 1), host, (2, 3))) == Landed(0, TransferEnd.OTHER_MODEL)
    assert list(store.scan()) == []


def test_slots_of_other_sizes_are_corrupt_and_not_found(folder: ModelFolder, host: DramSlab) -> None:
    store = nvme_store(folder, 4, block_tokens=BLOCK_TOKENS * 2)
    store.copy_in(chain_run((0,), host, (0,)))
    store.close()
    store = nvme_store(folder, 4)
    assert store.copy_out(chain_run((0,), host, (0,))) == Landed(0, TransferEnd.CORRUPT)
    assert list(store.scan()) == []
    store.close()


def test_an_older_formats_header_is_not_read(store: NvmeStore, folder: ModelFolder, host: DramSlab) -> None:
    store.copy_in(chain_run((0,), host, (0,)))
    with (folder.slabs / "0000.kv").open("r+b") as file:
        magic = file.read(8)
        file.seek(0)
        file.write(seal(magic + struct.pack("<I", FORMAT_VERSION - 1)))
    assert store.copy_out(chain_run((0,), host, (0,))) == Landed(0, TransferEnd.OTHER_FORMAT)
    assert list(store.scan()) == []


# --- files that change under us -----------------------------------------------------------


@pytest.mark.parametrize("length", [0, 100, STRIDE, STRIDE + HEADER_BYTES, STRIDE + 5000, 2 * STRIDE - 1])
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_slab_cut_short_has_what_lies_before_the_cut_and_is_mended_by_writing(
    folder: ModelFolder, host: DramSlab, length: int, io: str
) -> None:
    store = nvme_store(folder, 4, io=io)
    written = fill(host, (0, 1, 2, 3))
    store.copy_in(chain_run((0, 1, 2, 3), host, (0, 1, 2, 3)))
    os.truncate(folder.slabs / "0000.kv", length)
    landed = store.copy_out(chain_run((0, 1, 2, 3), host, (4, 5, 6, 7)))
    assert landed == Landed(length // STRIDE, TransferEnd.CORRUPT)
    assert contents(host, (4,))[: landed.good] == written[: landed.good]
    assert store.bytes_on_disk == length
    store.copy_in(chain_run((3,), host, (3,), first_block=3))
    assert segments(folder) == {"0000.kv": 4 * STRIDE}
    assert store.copy_out(chain_run((3,), host, (5,), first_block=3)) == Landed(1)
    assert store.copy_out(chain_run((2,), host, (5,), first_block=2)) == Landed(0, TransferEnd.STALE)
    store.close()


def test_a_slab_that_is_deleted_is_stale_at_once_and_made_anew_by_writing(
    store: NvmeStore, folder: ModelFolder, host: DramSlab
) -> None:
    (block,) = fill(host, (0,))
    store.copy_in(chain_run((0, 1), host, (0, 0)))
    (folder.slabs / "0000.kv").unlink()
    assert store.copy_out(chain_run((0,), host, (1,))) == Landed(0, TransferEnd.STALE)
    assert (store.slots_made, list(store.scan())) == (0, [])
    assert store.copy_in(chain_run((1,), host, (0,))) == Landed(1)
    assert store.copy_out(chain_run((1,), host, (1,))) == Landed(1)
    assert contents(host, (1,)) == [block]
    assert segments(folder) == {"0000.kv": 4 * STRIDE}


def test_a_slab_that_is_deleted_before_a_write_takes_no_block_into_the_void(
    store: NvmeStore, folder: ModelFolder, host: DramSlab
) -> None:
    store.copy_in(chain_run((0,), host, (0,)))
    (folder.slabs / "0000.kv").unlink()
    store.copy_in(chain_run((1,), host, (0,)))
    store.close()
    again = nvme_store(folder, NUM_SLOTS, **SMALL)
    assert [found.slot for found in again.scan()] == [1]
    again.close()


def test_a_directory_that_is_deleted_fails_every_read_until_a_write_makes_it_anew(
    store: NvmeStore, folder: ModelFolder, host: DramSlab
) -> None:
    store.copy_in(chain_run((0, 4), host, (0, 1)))
    shutil.rmtree(folder.path.parent / folder.path.name)
    assert store.copy_out(chain_run((0, 4), host, (2, 3))) == Landed(0, TransferEnd.FAILED)
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(1)
    assert store.copy_out(chain_run((0, 4), host, (2, 3))) == Landed(1, TransferEnd.STALE)
    assert (folder.path / "model.json").exists()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_directory_that_another_server_took_after_it_was_deleted_is_not_written(
    tmp_path: Path, host: DramSlab
) -> None:
    ours, theirs = (NvmeDirectory(tmp_path / "nvme", keep_free_share=0.0) for _ in range(2))
    ours.open()
    folder = ours.folder("tiny", b"m" * 16)
    store = nvme_store(folder, 4, make_room=ours.make_room)
    store.copy_in(chain_run((0,), host, (0,)))
    shutil.rmtree(ours.root)
    theirs.open()
    other = nvme_store(theirs.folder("tiny", b"m" * 16), 4, make_room=theirs.make_room)
    other.copy_in(chain_run((0,), host, (0,), chain=2))
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(0, TransferEnd.FAILED)
    assert other.copy_out(chain_run((0,), host, (1,), chain=2)) == Landed(1)
    other.close()
    theirs.close()
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(1)
    store.close()
    ours.close()


def test_whether_the_folder_can_be_used_is_told_by_trying(
    store: NvmeStore, folder: ModelFolder, files: FaultyFiles
) -> None:
    assert store.probe()
    shutil.rmtree(folder.path)
    assert store.probe(), "it can be made again"
    files.errors["write"] = errno.EIO
    assert not store.probe()
    del files.errors["write"]
    files.flips = 1
    assert not store.probe()
    assert store.probe()
    assert sorted(path.name for path in folder.path.iterdir()) == ["model.json", "slabs"]


def test_what_is_not_ours_is_left_alone(folder: ModelFolder, host: DramSlab, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    folder.make()
    (folder.slabs / "0000.kv").symlink_to(elsewhere)
    (folder.slabs / "0001.kv").mkdir()
    for name in ("notes.txt", "1.kv", "00007.kv", "9999.kv.bak"):
        (folder.slabs / name).write_bytes(b"not ours")
    store = nvme_store(folder, 8, segment_bytes=STRIDE)
    for slot in (0, 1):
        assert store.copy_in(chain_run((slot,), host, (0,))) == Landed(0, TransferEnd.FAILED)
        assert store.copy_out(chain_run((slot,), host, (0,))) == Landed(0, TransferEnd.STALE)
    assert store.copy_in(chain_run((2,), host, (0,))) == Landed(1)
    assert store.bytes_on_disk == STRIDE
    store.close()
    others = [elsewhere, *(folder.slabs / name for name in ("notes.txt", "1.kv", "00007.kv", "9999.kv.bak"))]
    assert {path.read_bytes() for path in others} == {b"not ours"}


# --- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
def test_a_block_that_says_eio_breaks_its_slot_alone(
    store: NvmeStore, files: FaultyFiles, host: DramSlab, direction: str
) -> None:
    written = fill(host, (0, 1, 2, 3))
    store.copy_in(chain_run((0, 1, 2, 3), host, (0, 1, 2, 3)))
    files.bad = range(2 * STRIDE + 5000, 2 * STRIDE + 5001)
    copy: Callable[[Run], Landed] = getattr(store, direction)
    targets = (0, 1, 2, 3) if direction == "copy_in" else (4, 5, 6, 7)
    assert copy(chain_run((0, 1, 2, 3), host, targets)) == Landed(2, TransferEnd.SLOT_BROKEN)
    assert contents(host, targets)[:2] == written[:2]
    assert copy(chain_run((3,), host, (3,), first_block=3)) == Landed(1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ENXIO, errno.EDQUOT])
def test_any_other_error_says_nothing_of_the_slot(
    store: NvmeStore, files: FaultyFiles, host: DramSlab, code: int
) -> None:
    written = fill(host, (0, 1))
    store.copy_in(chain_run((0, 1), host, (0, 1)))
    files.errors = {"write": code}
    assert store.copy_in(chain_run((2,), host, (0,))) == Landed(0, TransferEnd.FAILED)
    assert store.copy_out(chain_run((0, 1), host, (4, 5))) == Landed(2)
    files.errors = {"read": code}
    assert store.copy_out(chain_run((0, 1), host, (4, 5))) == Landed(0, TransferEnd.FAILED)
    files.errors = {}
    assert store.copy_out(chain_run((0, 1), host, (6, 7))) == Landed(2)
    assert contents(host, (6, 7)) == written


def test_a_disk_without_room_for_a_file_is_left_without_half_of_one(
    store: NvmeStore, files: FaultyFiles, folder: ModelFolder, host: DramSlab
) -> None:
    files.errors = {"resize": errno.ENOSPC}
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(0, TransferEnd.FAILED)
    assert (segments(folder), store.slots_made) == ({}, 0)
    files.errors = {}
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(1)


def test_a_file_system_that_became_read_only_is_still_read(
    folder: ModelFolder, files: FaultyFiles, host: DramSlab
) -> None:
    first = nvme_store(folder, NUM_SLOTS, **SMALL)
    first.copy_in(chain_run((0,), host, (0,)))
    first.close()
    store = nvme_store(folder, NUM_SLOTS, files=files, **SMALL)
    files.errors = {"open for writing": errno.EROFS, "write": errno.EROFS}
    assert store.copy_out(chain_run((0,), host, (1,))) == Landed(1)
    assert store.copy_in(chain_run((1,), host, (1,))) == Landed(0, TransferEnd.FAILED)
    assert store.erase((0,)) == (0,)
    files.errors = {}
    assert store.erase((0,)) == ()
    assert store.copy_in(chain_run((1,), host, (1,))) == Landed(1)
    store.close()
    assert files.open_files == set()


def test_where_there_is_no_room_nothing_is_made_and_what_is_there_serves_on(
    folder: ModelFolder, host: DramSlab
) -> None:
    asked: list[int] = []

    def make_room(size: int) -> bool:
        asked.append(size)
        return len(asked) < 3

    store = nvme_store(folder, NUM_SLOTS, make_room=make_room, **SMALL)
    assert store.copy_in(chain_run((2, 3, 4, 5), host, (0, 1, 2, 3))) == Landed(2, TransferEnd.FAILED)
    assert asked == [0, 4 * STRIDE, 4 * STRIDE]
    assert segments(folder) == {"0000.kv": 4 * STRIDE}
    assert store.copy_out(chain_run((2, 3), host, (4, 5))) == Landed(2)
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(1)
    store.close()


@pytest.mark.parametrize("most", [4096, 3 * 4096, 5 * 4096, 10_000])
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_calls_that_move_less_than_asked_or_are_interrupted_are_gone_on_with(
    folder: ModelFolder, files: FaultyFiles, host: DramSlab, most: int, io: str
) -> None:
    store = nvme_store(folder, NUM_SLOTS, files=files, io=io, **SMALL)
    written = fill(host, (0, 1, 2))
    if store.io == "buffered" or most % 4096 == 0:
        files.most, files.interrupts = most, 3
    assert store.copy_in(chain_run((0, 1, 2), host, (0, 1, 2))) == Landed(3)
    files.interrupts = 3
    assert store.copy_out(chain_run((0, 1, 2), host, (3, 4, 5))) == Landed(3)
    assert contents(host, (3, 4, 5)) == written
    store.close()


def test_a_disk_that_takes_no_byte_more_keeps_what_is_whole(
    store: NvmeStore, files: FaultyFiles, host: DramSlab
) -> None:
    store.copy_in(chain_run((0, 1, 2), host, (0, 1, 2)))
    files.most = 0
    assert store.copy_in(chain_run((0, 1, 2), host, (0, 1, 2))) == Landed(0, TransferEnd.FAILED)


def test_a_bit_that_flips_on_the_way_is_noticed(store: NvmeStore, files: FaultyFiles, host: DramSlab) -> None:
    store.copy_in(chain_run((0,), host, (0,)))
    files.flips = 1
    assert store.copy_out(chain_run((0,), host, (1,))) == Landed(0, TransferEnd.CORRUPT)
    assert store.copy_out(chain_run((0,), host, (1,))) == Landed(1)


@pytest.mark.parametrize("name", ["read", "write"])
def test_a_call_that_hangs_holds_up_nobody_else_nor_closing(
    store: NvmeStore, files: FaultyFiles, host: DramSlab, name: str
) -> None:
    store.copy_in(chain_run((0, 1), host, (0, 1)))
    files.hang(name)
    hanging = chain_run((0,), host, (2,))
    ends: list[Landed] = []
    thread = threading.Thread(
        target=lambda: ends.append((store.copy_in if name == "write" else store.copy_out)(hanging))
    )
    thread.start()
    files.reached.acquire()
    other = store.copy_out if name == "write" else store.copy_in
    assert other(chain_run((1,), host, (1,), first_block=1)) == Landed(1)
    store.close()
    assert len(files.open_files) == 1, "what hangs keeps its file; its number must not become another's"
    files.release()
    thread.join(30.0)
    assert ends == [Landed(1)]
    assert files.open_files == set()


def test_making_a_file_that_hangs_holds_up_no_reader(store: NvmeStore, files: FaultyFiles, host: DramSlab) -> None:
    store.copy_in(chain_run((0,), host, (0,)))
    files.hang("resize")
    thread = threading.Thread(target=lambda: store.copy_in(chain_run((4,), host, (0,))))
    thread.start()
    files.reached.acquire()
    assert store.copy_out(chain_run((0,), host, (1,))) == Landed(1)
    assert store.copy_out(chain_run((4,), host, (1,))) == Landed(0, TransferEnd.STALE)
    files.release()
    thread.join(30.0)
    assert store.copy_out(chain_run((4,), host, (1,))) == Landed(1)


# --- a process that is killed -------------------------------------------------------------

WRITER = """
import os, pathlib, sys, threading
from kvstore.nvme_dir import ModelFolder
from kvstore.tiers.base import Run
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.nvme import NvmeStore

folder = ModelFolder(pathlib.Path(sys.argv[1]), "tiny", bytes.fromhex(sys.argv[2]))
store = NvmeStore(folder, 16, 8192, block_tokens=4, make_room=lambda size: True)
store.open()

def write(thread):
    # Four slots of its own, again and again; what lies in a block follows from its name.
    host, slots = DramSlab(4, 8192), tuple(range(4 * thread, 4 * thread + 4))
    host.open()
    for number in range(10**9):
        names = [100 * number + slot for slot in slots]
        keys = tuple(name.to_bytes(16, "little") for name in names)
        for place, name in enumerate(names):
            host.view(place)[:] = bytes([name % 251]) * host.slot_bytes
        store.copy_in(Run(slots, host, (0, 1, 2, 3), keys))
        os.write(1, b"wrote\\n")

for thread in range(4):
    threading.Thread(target=write, args=(thread,)).start()
"""


def test_what_a_killed_process_wrote_is_whole_or_a_miss(folder: ModelFolder, host: DramSlab) -> None:
    root = Path(__file__).parents[2]
    for after in (1, 7, 40):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, folder.path, folder.model_key.hex()],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
        ) as process:
            assert process.stdout is not None
            for _ in range(after):
                assert process.stdout.readline() == "wrote\n"
            process.kill()
        store = nvme_store(folder, 16)
        found = list(store.scan())
        assert len(found) >= 4
        for block in found:
            landed = store.copy_out(Run((block.slot,), host, (0,), (block.key,)))
            assert landed.reason is store.verify(block.slot, block.key)
            name = int.from_bytes(block.key, "little")
            if landed.good:
                assert contents(host, (0,)) == [bytes([name % 251]) * SLOT_BYTES]
        store.close()


# --- real disks that are full -------------------------------------------------------------


def test_a_limit_on_file_sizes_is_one_more_thing_that_fails(folder: ModelFolder, host: DramSlab) -> None:
    store = nvme_store(folder, 64, segment_bytes=64 * STRIDE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * STRIDE, hard))
    try:
        assert store.copy_in(chain_run((0,), host, (0,))) == Landed(0, TransferEnd.FAILED)
        assert segments(folder) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(1)
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 16 slots and a little."""
    path = tmp_path / "disk"
    path.mkdir()
    size = 17 * STRIDE
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("this user may not mount")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_disk_that_is_full_takes_what_fits_and_goes_on_when_there_is_room(
    small_disk: Path, host: DramSlab, reserves: bool
) -> None:
    folder = model_folder(small_disk)
    files = OsFileIO(libc_fallocate() if reserves else None)
    store = nvme_store(folder, 32, files=files, io="auto", segment_bytes=4 * STRIDE)
    fill(host, (0,))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(8 * STRIDE))
    ends = [store.copy_in(run((slot,), host, (0,))) for slot in range(32)]
    good = ends.count(Landed(1))
    assert 4 <= good <= 8
    assert ends == [Landed(1)] * good + [Landed(0, TransferEnd.FAILED)] * (32 - good)
    assert all(store.copy_out(run((slot,), host, (1,))) == Landed(1) for slot in range(good))
    filler.unlink()
    assert store.copy_in(run((good,), host, (0,))) == Landed(1)
    store.close()


# --- erasing, scanning --------------------------------------------------------------------


def no_room_can_be_given_back(fd: int, mode: int, offset: int, length: int) -> int:
    return errno.EOPNOTSUPP if mode else 0


def only_holes(fd: int, mode: int, offset: int, length: int) -> int:
    real = libc_fallocate()
    if real is None or mode == 0x11:  # a zeroed range
        return errno.EOPNOTSUPP
    return real(fd, mode, offset, length)


@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize("ability", [libc_fallocate(), only_holes, no_room_can_be_given_back, None])
def test_what_is_erased_leaves_no_byte_in_the_file_and_its_neighbours_whole(
    folder: ModelFolder, host: DramSlab, io: str, ability: Callable[[int, int, int, int], int] | None
) -> None:
    store = nvme_store(folder, NUM_SLOTS, files=OsFileIO(ability), io=io, **SMALL)
    written = fill(host, tuple(range(8)))
    store.copy_in(chain_run(tuple(range(8)), host, tuple(range(8))))
    assert store.erase((1, 2, 6, 9)) == ()
    data = b"".join((folder.slabs / name).read_bytes() for name in segments(folder))
    for block in (1, 2, 6):
        assert not any(written[block][start : start + 16] in data for start in range(0, SLOT_BYTES, 512))
        assert data[block * STRIDE : (block + 1) * STRIDE] == bytes(STRIDE)
        assert store.copy_out(chain_run((block,), host, (8,), first_block=block)) == Landed(0, TransferEnd.STALE)
    assert [found.slot for found in store.scan()] == [0, 3, 4, 5, 7]
    for block in (0, 3, 4, 5, 7):
        assert store.copy_out(chain_run((block,), host, (8,), first_block=block)) == Landed(1)
    assert store.copy_in(chain_run((1,), host, (1,), first_block=1)) == Landed(1)
    assert store.copy_out(chain_run((1,), host, (8,), first_block=1)) == Landed(1)
    assert segments(folder) == {"0000.kv": 4 * STRIDE, "0001.kv": 4 * STRIDE}
    store.close()


def test_slots_that_could_not_be_erased_are_named(store: NvmeStore, files: FaultyFiles, host: DramSlab) -> None:
    store.copy_in(chain_run((0, 1, 4), host, (0, 1, 2)))
    files.errors = {"zero": errno.EIO}
    assert store.erase((0, 1)) == (0, 1)
    files.errors = {}
    assert store.erase((0, 1)) == ()
    with pytest.raises(IndexError):
        store.erase((NUM_SLOTS,))


def test_the_next_process_finds_every_keyed_block_and_where_it_lies_in_its_chain(
    folder: ModelFolder, host: DramSlab
) -> None:
    store = nvme_store(folder, NUM_SLOTS, **SMALL)
    written = fill(host, tuple(range(8)))
    store.copy_in(chain_run((9, 0, 1), host, (0, 1, 2)))
    store.copy_in(chain_run((5,), host, (3,), first_block=3))
    store.copy_in(chain_run((4,), host, (4,), chain=2))
    store.copy_in(run((2, 3), host, (5, 6)))
    store.copy_in(chain_run((6,), host, (0,)))  # the first again: equal keys are interchangeable
    store.close()
    again = nvme_store(folder, NUM_SLOTS, **SMALL)
    assert list(again.scan()) == [
        FoundBlock(0, key(1001), key(1000), 1),
        FoundBlock(1, key(1002), key(1001), 2),
        FoundBlock(4, key(2000), None, 0),
        FoundBlock(5, key(1003), key(1002), 3),
        FoundBlock(6, key(1000), None, 0),
    ]
    assert again.copy_out(chain_run((6, 0, 1, 5), host, (8, 9, 10, 11))) == Landed(4)
    assert contents(host, (8, 9, 10, 11)) == written[:4]
    again.close()


def test_what_scanning_finds_is_what_verifying_accepts_of_all_that_was_written_whole(
    store: NvmeStore, folder: ModelFolder, host: DramSlab
) -> None:
    store.copy_in(chain_run(tuple(range(8)), host, tuple(range(8))))
    path = folder.slabs / "0000.kv"
    damaged = bytearray(path.read_bytes())
    damaged[STRIDE + 40] ^= 1  # a header
    damaged[3 * STRIDE - 1] ^= 1  # a payload
    path.write_bytes(damaged)
    found = {block.slot: block.key for block in store.scan()}
    assert sorted(found) == [0, 2, 3, 4, 5, 6, 7], "headers alone tell of no payload"
    accepted = [slot for slot in range(NUM_SLOTS) if store.verify(slot, key(1000 + slot)) is TransferEnd.DONE]
    assert accepted == [slot for slot in found if store.verify(slot, found[slot]) is TransferEnd.DONE]
    assert accepted == [0, 3, 4, 5, 6, 7]
    assert store.verify(2, key(1002)) is TransferEnd.CORRUPT
    assert store.verify(8, key(1008)) is TransferEnd.STALE
    assert store.verify(0, key(1001)) is TransferEnd.STALE


def test_verifying_says_what_the_medium_does(store: NvmeStore, files: FaultyFiles, host: DramSlab) -> None:
    store.copy_in(chain_run((0,), host, (0,)))
    files.bad = range(HEADER_BYTES + 1, HEADER_BYTES + 2)
    assert store.verify(0, key(1000)) is TransferEnd.SLOT_BROKEN
    files.errors = {"read": errno.ENXIO}
    assert store.verify(0, key(1000)) is TransferEnd.FAILED
    assert list(store.scan()) == []


# --- opening ------------------------------------------------------------------------------


def test_a_smaller_capacity_cuts_off_what_lies_beyond_it_and_a_larger_one_grows_the_last_file(
    folder: ModelFolder, host: DramSlab
) -> None:
    store = nvme_store(folder, NUM_SLOTS, **SMALL)
    store.copy_in(chain_run(tuple(range(10)), host, tuple(range(10))))
    store.close()
    smaller = nvme_store(folder, 6, **SMALL)
    assert segments(folder) == {"0000.kv": 4 * STRIDE, "0001.kv": 2 * STRIDE}
    assert (smaller.slots_made, smaller.bytes_on_disk) == (6, 6 * STRIDE)
    assert [found.slot for found in smaller.scan()] == [0, 1, 2, 3, 4, 5]
    smaller.close()
    asked: list[int] = []

    def make_room(size: int) -> bool:
        asked.append(size)
        return True

    larger = nvme_store(folder, 12, make_room=make_room, **SMALL)
    assert larger.slots_made == 6
    assert larger.copy_in(chain_run((7,), host, (0,), chain=2)) == Landed(1)
    assert asked == [0, 2 * STRIDE], "what an earlier run left may be over the quota by now"
    assert [found.slot for found in larger.scan()] == [0, 1, 2, 3, 4, 5, 7]
    larger.close()


def test_direct_io_is_used_where_it_works(folder: ModelFolder, host: DramSlab) -> None:
    files = FaultyFiles()
    store = nvme_store(folder, 4, io="auto", files=files)
    store.copy_in(chain_run((0,), host, (0,)))
    assert store.io in ("direct", "buffered")
    assert (files.calls["open direct"] > 1) == (store.io == "direct")
    store.close()
    assert sorted(path.name for path in folder.path.iterdir()) == ["model.json", "slabs"]


@pytest.mark.parametrize("trouble", ["refused", "wrong"])
def test_where_direct_io_does_not_work_auto_is_buffered_and_direct_is_refused(
    folder: ModelFolder, host: DramSlab, trouble: str
) -> None:
    files = FaultyFiles()
    files.errors = {"open direct": errno.EINVAL} if trouble == "refused" else {}
    files.direct_reads_wrong = trouble == "wrong"
    store = nvme_store(folder, 4, io="auto", files=files)
    assert store.io == "buffered"
    assert store.copy_in(chain_run((0,), host, (0,))) == Landed(1)
    assert store.copy_out(chain_run((0,), host, (1,))) == Landed(1)
    store.close()
    with pytest.raises(SettingInvalid, match=r"--nvme-io: .* cannot be read directly \(.*\); use auto"):
        nvme_store(folder, 4, io="direct", files=files)


def test_a_folder_that_cannot_be_written_stops_the_start_and_names_the_flag(
    folder: ModelFolder, files: FaultyFiles
) -> None:
    files.errors = {"open for writing": errno.EROFS}
    with pytest.raises(SettingInvalid, match=r"--nvme-dir: .* cannot be used: .*Read-only file system"):
        nvme_store(folder, 4, files=files)


# --- memory -------------------------------------------------------------------------------


def test_memory_does_not_grow_with_what_is_moved(folder: ModelFolder) -> None:
    size = 2**20
    large = slab(8, slot_bytes=size)
    fill(large, (0,))
    store = NvmeStore(folder, 8, size, block_tokens=BLOCK_TOKENS, make_room=lambda size: True)
    store.open()
    every = tuple(range(8))

    def back_and_forth() -> None:
        store.copy_in(chain_run(every, large, (0,) * 8))
        assert store.copy_out(chain_run(every, large, every)) == Landed(8)

    for _ in range(3):
        back_and_forth()
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        back_and_forth()
    assert psutil.Process().memory_info().rss - before < size
    store.close()
    large.close()
