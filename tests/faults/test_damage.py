"""Files that are not what was written: a miss that says why, the right text, and reuse again afterwards."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.codec import FORMAT_VERSION, HEADER_BYTES, SlotHeader, seal, unpack
from tests.faults.server import Server, Talk, serving, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.faults.conftest import Control


STRIDE = HEADER_BYTES + 8192
"""Of the tiny model's slots."""


def first_block(root: Path) -> tuple[Path, int, SlotHeader]:
    """Where the beginning of the only conversation lies: its file, its slot's offset, and what the slot says."""
    found = []
    for path in root.glob("*/slabs/*.kv"):
        data = path.read_bytes()
        for offset in range(0, len(data), STRIDE):
            header = unpack(data[offset : offset + HEADER_BYTES])
            if isinstance(header, SlotHeader) and header.first_token == 0:
                found.append((path, offset, header))
    (place,) = found
    return place


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    change(path, offset, bytes([path.read_bytes()[offset] ^ 0x10]))


def flip_payload(root: Path) -> None:
    path, offset, _ = first_block(root)
    flip(path, offset + HEADER_BYTES + 4321)


def flip_header(root: Path) -> None:
    path, offset, _ = first_block(root)
    flip(path, offset + 40)


def truncate(root: Path) -> None:
    path, offset, _ = first_block(root)
    os.truncate(path, offset + HEADER_BYTES + 100)


def zero(root: Path) -> None:
    path, offset, _ = first_block(root)
    change(path, offset, bytes(HEADER_BYTES))


def remove_slab(root: Path) -> None:
    path, _, _ = first_block(root)
    path.unlink()


def of_another_version(root: Path) -> None:
    path, offset, header = first_block(root)
    change(path, offset, seal(header.pack()[:8] + struct.pack("<I", FORMAT_VERSION - 1)))


def of_another_model(root: Path) -> None:
    """As if a file of another model's folder had been copied over this one."""
    path, offset, header = first_block(root)
    change(path, offset, replace(header, model=b"another model's.").pack())


DAMAGES = [
    (flip_payload, "corrupt"),
    (flip_header, "corrupt"),
    (truncate, "corrupt"),
    (of_another_version, "store_format"),
    (of_another_model, "model_changed"),
    (zero, "evicted"),
    (remove_slab, "evicted"),
]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_slot_is_a_miss_that_says_why_and_the_text_is_right(
    shared: tuple[Server, Path], control: Control, damage: Callable[[Path], None], reason: str
) -> None:
    server, root = shared
    talk = Talk(damage.__name__)
    assert server.say(talk)["miss_reason"] == "new_session"
    server.asleep(talk)
    damage(root)
    server.check_missed(server.say(talk), reason)
    server.asleep(talk)
    told = server.say(talk)
    assert (told["miss_reason"], told["woke_from"], told["reused_tokens"]["hbm"]) == (None, "nvme", 0)
    assert talk.texts == control(talk.name)[:3]
    assert server.health() == {"status": "ok"}, "a slot that was damaged says nothing against the disk"
    server.check_sound()


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    root = tmp_path_factory.mktemp("shared") / "nvme"
    with serving(settings(model, root)) as server:
        yield server, root


@pytest.fixture
def fresh(shared: tuple[Server, Path]) -> None:
    """Nothing of an earlier test is there: the first slot is the next conversation's."""
    server, _ = shared
    assert server.http.delete("/v1/sessions").status_code == 200


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_what_was_damaged_between_two_servers_is_noticed_by_the_second(
    model: Path, tmp_path: Path, control: Control, damage: Callable[[Path], None], reason: str
) -> None:
    configured, talk = settings(model, tmp_path / "nvme"), Talk(damage.__name__)
    with serving(configured) as server:
        server.say(talk)
    damage(tmp_path / "nvme")
    with serving(configured) as server:
        server.check_missed(server.say(talk), reason)
        server.asleep(talk)
        assert server.say(talk)["woke_from"] == "nvme"
        assert talk.texts == control(talk.name)[:3]
        server.check_sound()
