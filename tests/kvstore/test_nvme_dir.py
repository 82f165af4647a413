"""The directory NVMe's files live in: its lock, its format, its quota, and what it leaves alone."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.codec import FORMAT_VERSION
from kvstore.errors import SettingInvalid
from kvstore.nvme_dir import ModelFolder, NvmeDirectory, holder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = bytes(range(16))
MIB = 2**20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
def directory(root: Path) -> Iterator[NvmeDirectory]:
    made = NvmeDirectory(root, keep_free_share=0.0)
    made.open()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvstore.nvme_dir")


def model(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(folder: ModelFolder, size: int, opened: float = 0.0) -> None:
    """A slab of `size` bytes; the folder was last opened then."""
    folder.make()
    (folder.slabs / "0000.kv").write_bytes(bytes(size))
    os.utime(folder.path / "model.json", (opened, opened))


def earlier_run(root: Path, *sizes: int) -> list[ModelFolder]:
    """Folders of models 1, 2, ..., opened in this order, of an earlier process."""
    made = NvmeDirectory(root)
    made.open()
    folders = [made.folder(f"model{number}", model(number)) for number in range(1, len(sizes) + 1)]
    made.close()
    for place, (folder, size) in enumerate(zip(folders, sizes, strict=True)):
        put(folder, size, opened=1000.0 + place)
    return folders


def test_it_is_made_for_this_user_alone(directory: NvmeDirectory, root: Path) -> None:
    directory.folder("SmolLM2", KEY)
    modes = {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    assert modes == {
        "dormouse.lock": 0o600,
        "dormouse-format": 0o600,
        "SmolLM2-000102030405": 0o700,
        "SmolLM2-000102030405/model.json": 0o600,
        "SmolLM2-000102030405/slabs": 0o700,
    }
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_made_stops_the_start_and_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingInvalid, match=r"--nvme-dir: .* cannot be used"):
        NvmeDirectory(tmp_path / "file" / "below").open()
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "dormouse.lock").mkdir()
    with pytest.raises(SettingInvalid, match=r"--nvme-dir: .* cannot be used"):
        NvmeDirectory(tmp_path / "nvme").open()


# --- the lock -----------------------------------------------------------------------------


def test_a_second_server_is_refused_and_told_who_has_it(directory: NvmeDirectory, root: Path) -> None:
    with pytest.raises(SettingInvalid, match=f"--nvme-dir: .* is in use by process {os.getpid()}; give another one"):
        NvmeDirectory(root).open()
    assert holder(root) == os.getpid()
    assert directory.make_room(1), "the first is untouched"
    directory.close()
    directory.close()
    assert holder(root) is None
    following = NvmeDirectory(root)
    following.open()
    following.close()


def test_when_the_holder_is_killed_the_next_takes_over(root: Path) -> None:
    hold = f"""
import pathlib, time
from kvstore.nvme_dir import NvmeDirectory
directory = NvmeDirectory(pathlib.Path({str(root)!r}))
directory.open()
print("held", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert holder(root) == process.pid
        with pytest.raises(SettingInvalid, match=f"process {process.pid}"):
            NvmeDirectory(root).open()
        process.send_signal(signal.SIGKILL)
    assert holder(root) is None
    following = NvmeDirectory(root)
    following.open()
    assert holder(root) == os.getpid()
    following.close()


def test_a_directory_that_is_deleted_under_us_is_taken_again_by_the_next_that_needs_room(
    directory: NvmeDirectory, root: Path
) -> None:
    folder = directory.folder("tiny", KEY)
    shutil.rmtree(root)
    assert directory.make_room(1)
    assert holder(root) == os.getpid()
    assert (root / "dormouse-format").read_text() == f"{FORMAT_VERSION}\n"
    folder.make()
    assert [found.path for found in directory.folders()] == [folder.path]


def test_a_directory_that_another_took_meanwhile_has_no_room_for_us(directory: NvmeDirectory, root: Path) -> None:
    shutil.rmtree(root)
    other = NvmeDirectory(root, keep_free_share=0.0)
    other.open()
    assert not directory.make_room(1)
    assert other.make_room(1)
    other.close()
    assert directory.make_room(1)


# --- the format ---------------------------------------------------------------------------


def test_what_another_version_wrote_is_set_aside_whole_and_ours_begins_empty(root: Path) -> None:
    (folder,) = earlier_run(root, 100)
    (root / "dormouse-format").write_text("0\n")
    (root / "catalog.sqlite").write_bytes(b"old")
    (root / "catalog.sqlite-wal").write_bytes(b"old")
    (root / "notes.txt").write_bytes(b"not ours")
    directory = NvmeDirectory(root)
    directory.open()
    aside = root / "set-aside-format-0"
    assert directory.set_aside == aside
    names = sorted(path.name for path in aside.iterdir())
    assert names == ["catalog.sqlite", "catalog.sqlite-wal", "dormouse-format", folder.path.name]
    assert sorted(path.name for path in root.iterdir()) == ["dormouse-format", "dormouse.lock", "notes.txt", aside.name]
    assert directory.folders() == []
    assert directory.bytes_held == 100, "it still counts"
    directory.close()
    (root / "dormouse-format").write_text("0\n")
    directory.open()
    assert directory.set_aside == root / "set-aside-format-0-2"
    directory.close()


def test_what_this_version_wrote_is_taken_over(root: Path) -> None:
    (folder,) = earlier_run(root, 100)
    directory = NvmeDirectory(root)
    directory.open()
    assert directory.set_aside is None
    assert directory.folder("model1", model(1)) == folder
    assert folder.bytes_held == 100
    directory.close()


# --- folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB_SmolLM2-135M-000102030405"),
        ("../../etc", "_.._etc-000102030405"),
        ("...", "model-000102030405"),
        ("", "model-000102030405"),
        ("a\x00b\nc d", "a_b_c_d-000102030405"),
        ("x" * 500, "x" * 80 + "-000102030405"),
    ],
)
def test_a_models_name_is_made_a_name_of_one_folder(
    directory: NvmeDirectory, root: Path, name: str, expected: str
) -> None:
    folder = directory.folder(name, KEY)
    assert folder.path == root / expected
    assert folder.slabs.is_dir()
    assert directory.folders() == [ModelFolder(root / expected, name, KEY)]


def test_two_models_whose_keys_begin_alike_do_not_share_a_folder(directory: NvmeDirectory) -> None:
    directory.folder("tiny", KEY)
    with pytest.raises(SettingInvalid, match=r"--nvme-dir: .* belongs to another model \(tiny\)"):
        directory.folder("tiny", KEY[:6] + bytes(10))


def test_folders_are_listed_longest_unused_first_and_opening_one_is_using_it(root: Path) -> None:
    first, second, third = earlier_run(root, 10, 20, 30)
    directory = NvmeDirectory(root)
    directory.open()
    assert directory.folders() == [first, second, third]
    directory.folder("model1", model(1))
    assert directory.folders() == [second, third, first]
    assert directory.bytes_held == 60
    assert directory.remove(second)
    assert (directory.folders(), directory.bytes_held) == ([third, first], 40)
    directory.close()


# --- room ---------------------------------------------------------------------------------


def test_the_folder_longest_unused_gives_way_and_one_in_use_never(root: Path) -> None:
    first, second, third = earlier_run(root, 4 * MIB, 3 * MIB, 2 * MIB)
    removed: list[Path] = []
    directory = NvmeDirectory(root, quota_bytes=10 * MIB, keep_free_share=0.0, on_removed=removed.append)
    directory.open()
    directory.folder("model1", model(1))
    assert directory.make_room(1 * MIB), "to the byte"
    assert removed == []
    assert directory.make_room(1 * MIB + 1)
    assert removed == [second.path]
    assert directory.make_room(6 * MIB)
    assert removed == [second.path, third.path]
    assert not directory.make_room(6 * MIB + 1)
    assert (directory.folders(), directory.bytes_held) == ([first], 4 * MIB)
    directory.close()


def test_what_was_set_aside_gives_way_first(root: Path) -> None:
    earlier_run(root, 4 * MIB)
    (root / "dormouse-format").write_text("0")
    (root / "catalog.sqlite").write_bytes(b"old")
    newer = NvmeDirectory(root)
    newer.open()
    newer.close()
    (folder,) = earlier_run(root, MIB)
    directory = NvmeDirectory(root, quota_bytes=5 * MIB, keep_free_share=0.0)
    directory.open()
    assert directory.make_room(MIB)
    assert not (root / "set-aside-format-0").exists()
    assert directory.folders() == [folder]
    directory.close()


def test_a_share_of_the_disk_stays_free(root: Path) -> None:
    (folder,) = earlier_run(root, MIB)
    directory = NvmeDirectory(root, keep_free_share=1.0)
    directory.open()
    directory.folder("model1", model(1))
    assert not directory.make_room(1)
    directory.keep_free_share = 0.0
    assert directory.make_room(1)
    disk = os.statvfs(root)
    assert not directory.make_room(disk.f_blocks * disk.f_frsize)
    assert directory.folders() == [folder]
    directory.close()


def test_nothing_is_removed_where_even_that_would_not_make_room(root: Path) -> None:
    folders = earlier_run(root, MIB, MIB)
    directory = NvmeDirectory(root, quota_bytes=4 * MIB, keep_free_share=0.0)
    directory.open()
    assert not directory.make_room(4 * MIB + 1)
    assert directory.folders() == folders
    assert directory.make_room(4 * MIB)
    assert directory.folders() == []
    directory.close()


def test_foreign_files_are_neither_counted_nor_removed(root: Path) -> None:
    first, second = earlier_run(root, MIB, MIB)
    theirs = {
        root / "notes.txt": b"not ours",
        root / "other-0123456789ab" / "slabs" / "0000.kv": bytes(100),  # no model.json
        first.path / "notes.txt": b"not ours",
        first.slabs / "mine.bin": b"not ours",
    }
    for path, data in theirs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    directory = NvmeDirectory(root, quota_bytes=MIB, keep_free_share=0.0)
    directory.open()
    assert directory.folders() == [first, second]
    assert directory.bytes_held == 2 * MIB
    assert directory.make_room(MIB)
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert not (first.slabs / "0000.kv").exists()
    assert not second.path.exists()
    assert directory.bytes_held == 0
    directory.close()


def test_a_link_is_nobodys_folder(directory: NvmeDirectory, root: Path, tmp_path: Path) -> None:
    outside = ModelFolder(tmp_path / "outside-0123456789ab", "outside", KEY)
    put(outside, 100)
    (root / outside.path.name).symlink_to(outside.path)
    assert directory.folders() == []
    directory.quota_bytes = 0
    assert not directory.make_room(1)
    assert outside.bytes_held == 100
