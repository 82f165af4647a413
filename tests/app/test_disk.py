"""`dormouse store` on a directory with real slots: alone, and beside a server that holds it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from app import disk_address
from app.cli import cli
from app.disk import Disk, sweep_others
from kvstore import catalog_reading as reading
from kvstore.block_journal import FolderBlocks
from kvstore.catalog import Catalog
from kvstore.catalog_rows import BlockRow, SlotShape
from kvstore.clocks import Clocks
from kvstore.errors import SettingInvalid
from kvstore.nvme_dir import NvmeDirectory
from kvstore.session_journal import CatalogJournal
from kvstore.tiers.base import Run
from kvstore.tiers.nvme import NvmeStore
from kvstore.workers import Workers
from tests.app.live import client
from tests.kvstore.shelf import MODEL, WAIT_SECONDS, Shelf, bytes_of, history, keys_of, session
from tests.kvstore.stores import BLOCK_TOKENS, SLOT_BYTES, STRIDE, contents, fill, slab

if TYPE_CHECKING:
    from kvstore.history import History
    from kvstore.types import BlockKey
    from tests.app.conftest import Scripted

OTHER = b"n" * 16
SHAPE = SlotShape(BLOCK_TOKENS, SLOT_BYTES, "bfloat16")
NUM_SLOTS = 8
FIRST = history("what the first said", [911, 42, 40_000, 7, 3, 18_003, 5, 77, 1204])
SECOND = history("what the second said", [911, 42, 40_000, 7, 9, 9, 9, 9, 9])  # shares its first block


def block_of(store: NvmeStore, told: History, slots: tuple[int, ...], seed: int) -> tuple[list[BlockRow], list[bytes]]:
    """Write a history's blocks into slots; what the catalog is to know of them, and their bytes."""
    keys: tuple[BlockKey | None, ...] = tuple(keys_of(list(told.token_ids)))
    host = slab(len(slots))
    written = fill(host, tuple(range(len(slots))), seed=seed)
    assert store.copy_in(Run(slots, host, tuple(range(len(slots))), keys[: len(slots)])).good == len(slots)
    assert contents(host, tuple(range(len(slots)))) == written
    host.close()
    rows = [
        BlockRow(slot, key, keys[place - 1] if place else None, place)
        for place, (slot, key) in enumerate(zip(slots, keys, strict=False))
        if key is not None
    ]
    return rows, written


@dataclass
class Kept:
    """A directory with two sessions of a model, which share a block, and one of another model."""

    root: Path
    payloads: dict[str, list[bytes]]

    def slabs(self) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(self.root.glob("*/slabs/*.kv")))

    def files(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.root.rglob("*") if path.is_file())


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    root = tmp_path / "nvme"
    directory = NvmeDirectory(root)
    directory.open()
    payloads: dict[str, list[bytes]] = {}
    serial = 0
    for model_key, name, told in ((MODEL, "tiny", [FIRST, SECOND]), (OTHER, "other", [FIRST])):
        catalog = Catalog.open(directory.catalog, 1000.0)
        row = catalog.folder(name, model_key, SHAPE, 1000.0)
        restored = catalog.restore(row, Clocks(500.0, 1000.0), 100, lambda: ())
        catalog.start(row, restored.next_serial)
        store = NvmeStore(
            directory.folder(name, model_key), NUM_SLOTS, SLOT_BYTES, block_tokens=BLOCK_TOKENS, io="buffered",
            make_room=lambda _size: True,
        )  # fmt: skip
        store.open()
        journal = CatalogJournal(catalog, lambda: 500.0, lambda: 1000.0)
        blocks = FolderBlocks(catalog, row, store.erase)
        for number, each in enumerate(told):
            made = session(serial, f"{name}-{number}", each)
            journal.keep(made, made.branches.values())
            serial += 1
            rows, payloads[f"{name}-{number}"] = block_of(store, each, (0, 1) if number == 0 else (2, 5), serial)
            blocks.record(rows if number == 0 else rows[1:])  # its first block is the other's
        blocks.close()
        journal.close()
        assert catalog.close(WAIT_SECONDS)
        store.close()
    directory.close()
    return Kept(root, payloads)


def dormouse(*args: str, stdin: str = "") -> Result:
    result = CliRunner().invoke(cli, ["store", *args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(*args: str, kept: Kept) -> dict[str, Any]:
    result = dormouse(*args, "--json", "--nvme-dir", str(kept.root))
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# --- nobody serves ------------------------------------------------------------------------


def test_ls_shows_models_and_sessions_and_no_text(kept: Kept) -> None:
    found = told("ls", kept=kept)
    assert found["path"] == str(kept.root)
    assert [(each["model"], each["sessions"], each["blocks"]) for each in found["folders"]] == [
        ("tiny", 2, 3),
        ("other", 1, 2),
    ]
    assert all(each["bytes"] % STRIDE == 0 and each["bytes"] > 0 for each in found["folders"])
    assert {(each["id"], each["model"], each["tokens"]) for each in found["sessions"]} == {
        ("tiny-0", "tiny", 9),
        ("tiny-1", "tiny", 9),
        ("other-0", "other", 9),
    }
    shown = dormouse("ls", "--nvme-dir", str(kept.root)).stdout
    assert "tiny-1" in shown
    assert "what the" not in shown


def test_path_prints_the_directory_and_needs_none(tmp_path: Path) -> None:
    assert dormouse("path", "--nvme-dir", str(tmp_path / "none")).stdout.strip() == str(tmp_path / "none")
    with pytest.raises(SettingInvalid, match="no such directory"):
        dormouse("ls", "--nvme-dir", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_verify_of_a_sound_store_reads_everything_and_is_content(kept: Kept) -> None:
    result = dormouse("verify", "--nvme-dir", str(kept.root))
    assert (result.exit_code, result.stdout) == (0, "5 blocks and 2 histories read: all as they were written\n")
    found = told("verify", kept=kept)
    assert (found["blocks"], found["histories"], found["sound"]) == ({"ok": 5}, {"ok": 2}, True)


def flip_payload(kept: Kept) -> None:
    path = next(kept.root.glob("tiny-*/slabs/0000.kv"))
    data = bytearray(path.read_bytes())
    data[STRIDE + 5000] ^= 1
    path.write_bytes(data)


def cut_slab(kept: Kept) -> None:
    os.truncate(next(kept.root.glob("tiny-*/slabs/0000.kv")), 5 * STRIDE)


def lose_slabs(kept: Kept) -> None:
    for path in kept.root.glob("other-*/slabs/*.kv"):
        path.unlink()


def change_history(kept: Kept) -> None:
    connection = sqlite3.connect(kept.root / "catalog.sqlite")
    connection.execute("UPDATE histories SET text = text || x'21'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("harm", "faults"),
    [
        (flip_payload, [r"tiny, slot 1: corrupt"]),
        (cut_slab, [r"tiny, slot 5: (stale|corrupt)"]),
        (lose_slabs, [r"other, slot 0: stale", r"other, slot 1: stale"]),
        (change_history, [r"history [0-9a-f]{32}: corrupt", r"history [0-9a-f]{32}: corrupt"]),
    ],
)
def test_verify_names_what_is_not_as_it_was_written(
    kept: Kept, harm: Callable[[Kept], None], faults: list[str]
) -> None:
    harm(kept)
    result = dormouse("verify", "--json", "--nvme-dir", str(kept.root))
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert len(found["faults"]) == len(faults)
    assert all(re.fullmatch(pattern, fault) for pattern, fault in zip(faults, found["faults"], strict=True))
    assert not found["sound"]


def test_verify_is_content_once_a_server_has_started_with_a_smaller_quota(kept: Kept) -> None:
    directory = NvmeDirectory(kept.root)
    directory.open()
    store = NvmeStore(
        directory.folder("tiny", MODEL), 2, SLOT_BYTES, block_tokens=BLOCK_TOKENS, io="buffered",
        make_room=lambda _size: True,
    )  # fmt: skip
    store.open()
    assert store.bytes_on_disk == 2 * STRIDE, "what is beyond the quota was cut off"
    catalog = Catalog.open(directory.catalog, 1000.0)
    row = catalog.folder("tiny", MODEL, SHAPE, 1000.0)
    restored = catalog.restore(row, Clocks(500.0, 1000.0), 100, store.scan, store.num_slots)
    assert list(restored.blocks.slots) == [0, 1]
    assert catalog.close(WAIT_SECONDS)
    store.close()
    directory.close()
    assert dormouse("verify", "--nvme-dir", str(kept.root)).exit_code == 0


def test_blocks_of_a_folder_that_is_gone_are_forgotten_and_its_sessions_are_not(kept: Kept) -> None:
    directory = NvmeDirectory(kept.root)
    directory.open()
    (other,) = kept.root.glob("other-*")
    shutil.rmtree(other)
    catalog = Catalog.open(directory.catalog, 1000.0)
    row = catalog.folder("tiny", MODEL, SHAPE, 1000.0)
    sweep_others(directory, catalog, catalog.swept, row)
    assert catalog.close(WAIT_SECONDS)
    directory.close()
    assert told("verify", kept=kept)["sound"]
    assert {each["id"] for each in told("ls", kept=kept)["sessions"]} == {"tiny-0", "tiny-1", "other-0"}


def test_rm_leaves_no_byte_of_a_session_and_all_of_those_that_share_with_it(kept: Kept) -> None:
    shared, own = kept.payloads["tiny-0"]
    assert shared in kept.slabs()
    assert own in kept.slabs()
    result = dormouse("rm", "tiny-0", "--yes", "--nvme-dir", str(kept.root))
    assert (result.exit_code, result.stdout) == (0, "1 removed\n")
    assert shared in kept.slabs()
    assert own not in kept.slabs()
    assert b"tiny-0" not in kept.files()
    assert {each["id"] for each in told("ls", kept=kept)["sessions"]} == {"tiny-1", "other-0"}
    assert told("verify", kept=kept)["sound"]
    catalog = kept.root / "catalog.sqlite"
    (row,) = [row for row in reading.folders(catalog) if row.model_key == MODEL]
    assert sorted(reading.blocks(catalog, row.number).slots) == [0, 5]


def test_rm_asks_first_and_takes_no_for_an_answer(kept: Kept) -> None:
    before = kept.files()
    result = dormouse("rm", "tiny-0", "--nvme-dir", str(kept.root), stdin="n\n")
    assert result.exit_code == 1
    assert {each["id"] for each in told("ls", kept=kept)["sessions"]} == {"tiny-0", "tiny-1", "other-0"}
    assert len(kept.files()) == len(before)


def test_rm_of_an_unknown_id_says_so(kept: Kept) -> None:
    result = dormouse("rm", "nobody", "--yes", "--nvme-dir", str(kept.root))
    assert result.exit_code == 1
    assert "no session 'nobody'" in result.stderr


def test_rm_all_leaves_no_byte_of_any(kept: Kept) -> None:
    assert dormouse("rm", "--all", "--yes", "--nvme-dir", str(kept.root)).exit_code == 0
    left = kept.files()
    for needle in (*bytes_of(FIRST), *bytes_of(SECOND), b"tiny-0", b"other-0"):
        assert needle not in left
    assert not any(payload in left for payloads in kept.payloads.values() for payload in payloads)
    assert told("ls", kept=kept)["sessions"] == []


def test_rm_wants_one_or_all(kept: Kept) -> None:
    assert dormouse("rm", "--nvme-dir", str(kept.root)).exit_code == 2
    assert dormouse("rm", "a", "--all", "--nvme-dir", str(kept.root)).exit_code == 2


def test_gc_erases_what_nobody_has_and_removes_what_was_set_aside_if_told_to(kept: Kept) -> None:
    with_catalog = Catalog.open(kept.root / "catalog.sqlite", 1000.0)
    with_catalog.drop_sessions(reading.serials(with_catalog.path, "other-0"))  # and then a crash
    with_catalog.close(0.0)
    aside = kept.root / "catalog.sqlite.damaged-0"
    aside.write_bytes(b"old text")
    (kept.root / "mine.txt").write_bytes(b"not of Dormouse")
    assert told("ls", kept=kept)["set_aside"] == [str(aside)]
    result = dormouse("gc", "--nvme-dir", str(kept.root), stdin="n\n")
    assert "other: 2 blocks erased" in result.stdout
    assert aside.exists()
    assert "nothing to do" in dormouse("gc", "--nvme-dir", str(kept.root), stdin="n\n").stdout
    assert told("gc", "--yes", kept=kept) == {"erased": {}, "removed": [str(aside)]}
    assert not aside.exists()
    assert (kept.root / "mine.txt").read_bytes() == b"not of Dormouse"
    assert told("verify", kept=kept)["sound"]


# --- a server holds it --------------------------------------------------------------------


@pytest.fixture
def served(kept: Kept, serve: Callable[..., Scripted]) -> Iterator[Kept]:
    """A server on the directory; it serves the first model."""
    directory = NvmeDirectory(kept.root)
    directory.open()
    store = NvmeStore(
        directory.folder("tiny", MODEL), NUM_SLOTS, SLOT_BYTES, block_tokens=BLOCK_TOKENS, io="buffered",
        make_room=lambda _size: True,
    )  # fmt: skip
    store.open()

    def shelf() -> Shelf:
        made = Shelf(kept.root, wall=2000.0)
        upkeep = Workers("disk-upkeep", 1)
        made.disk = Disk(directory, made.catalog, made.folder, store, made.blocks, upkeep)
        return made

    server = serve(shelf=shelf)
    disk_address.tell(kept.root, server.url, server.server.app.state.process_key)
    yield kept
    server.server.stop()
    server.server.thread.join(WAIT_SECONDS)
    store.close()
    directory.close()


def test_the_server_that_holds_the_directory_is_asked(served: Kept) -> None:
    found = told("ls", kept=served)
    assert {each["id"] for each in found["sessions"]} == {"tiny-0", "tiny-1", "other-0"}
    verdict = told("verify", kept=served)
    assert (verdict["blocks"], verdict["sound"]) == ({"ok": 5}, True)
    held = json.loads(dormouse("path", "--json", "--nvme-dir", str(served.root)).stdout)
    assert held["held_by"] is not None


def test_a_fault_that_a_server_finds_is_an_exit_status_too(served: Kept) -> None:
    flip_payload(served)
    result = dormouse("verify", "--nvme-dir", str(served.root))
    assert result.exit_code == 1
    assert "tiny, slot 1: corrupt" in result.stdout


def test_rm_through_a_server_takes_sessions_of_any_model(served: Kept) -> None:
    assert dormouse("rm", "other-0", "--yes", "--nvme-dir", str(served.root)).stdout == "1 removed\n"
    assert {each["id"] for each in told("ls", kept=served)["sessions"]} == {"tiny-0", "tiny-1"}
    assert b"other-0" not in served.files()
    assert b"".join(next(served.root.glob("other-*/slabs/0000.kv")).read_bytes().split(b"\0")) == b""
    assert dormouse("rm", "other-0", "--yes", "--nvme-dir", str(served.root)).exit_code == 1
    assert dormouse("rm", "--all", "--yes", "--nvme-dir", str(served.root)).exit_code == 0
    assert told("ls", kept=served)["sessions"] == []
    for needle in (*bytes_of(FIRST), *bytes_of(SECOND), b"tiny-0"):
        assert needle not in served.files()


def test_deleting_an_id_erases_another_models_blocks_before_it_is_answered(served: Kept) -> None:
    own = next(served.root.glob("other-*/slabs/0000.kv"))
    assert served.payloads["other-0"][1] in own.read_bytes()
    address = disk_address.find(served.root, os.getpid())
    assert address is not None
    with httpx.Client(base_url=address.url, trust_env=False) as http:
        assert http.delete("/v1/sessions/other-0").status_code == 200
    assert own.read_bytes().strip(b"\0") == b""
    assert told("verify", kept=served)["blocks"] == {"ok": 3}


def test_a_server_without_a_disk_says_so(serve: Callable[..., Scripted]) -> None:
    with client(serve().server) as http:
        reply = http.get("/admin/api/store")
    assert reply.status_code == 400
    assert "--nvme-bytes" in reply.json()["error"]["message"]


def test_a_holder_that_does_not_say_where_it_answers_is_named(kept: Kept) -> None:
    directory = NvmeDirectory(kept.root)
    directory.open()
    with pytest.raises(SettingInvalid, match=r"process \d+ holds"):
        dormouse("ls", "--nvme-dir", str(kept.root))
    directory.close()


def test_an_address_of_another_process_is_not_believed(tmp_path: Path) -> None:
    address = disk_address.Address("http://127.0.0.1:1", "a-key")
    disk_address.tell(tmp_path, address.url, address.key)
    assert (tmp_path / disk_address.NAME).stat().st_mode & 0o077 == 0
    assert disk_address.find(tmp_path, os.getpid()) == address
    assert disk_address.find(tmp_path, 0) == address
    assert disk_address.find(tmp_path, os.getpid() + 1) is None
    (tmp_path / disk_address.NAME).write_text("[]")
    assert disk_address.find(tmp_path, os.getpid()) is None
