"""Slots are forgotten once their bytes are gone, and not before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore import block_journal
from kvstore import catalog_reading as reading
from kvstore.block_journal import FolderBlocks
from kvstore.catalog_rows import BlockRow
from kvstore.events import RecordedBlock
from kvstore.types import BlockKey
from tests.kvstore.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvstore.journal import BlockJournal


def rows(*slots: int) -> list[BlockRow]:
    return [BlockRow(slot, BlockKey(bytes([slot]) * 16), None, 0) for slot in slots]


async def test_a_slot_is_forgotten_when_its_bytes_are_gone(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    journal: BlockJournal = shelf.blocks
    journal.record(tuple(RecordedBlock(row.key, row.parent, row.first_block, row.slot) for row in rows(1, 2, 3)))
    done = asyncio.Event()
    journal.erase((1, 3), done.set)
    await done.wait()
    assert shelf.erased == [1, 3]
    shelf.close()
    again = Shelf(tmp_path)
    assert list(again.restored.blocks.slots) == [2]
    again.close()


async def test_what_a_disk_does_not_erase_stays_in_the_catalog_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_journal, "FIRST_RETRY_SECONDS", 0.0)
    shelf = Shelf(tmp_path)
    tries: list[tuple[int, ...]] = []

    def erase(slots: Iterable[int]) -> tuple[int, ...]:
        tries.append(tuple(slots))
        return (2,) if len(tries) < 3 else ()

    blocks = FolderBlocks(shelf.catalog, shelf.folder, erase)
    blocks.record(rows(1, 2))
    done = asyncio.Event()
    blocks.erase((1, 2), done.set)
    await done.wait()
    assert tries == [(1, 2), (2,), (2,)]
    blocks.close()
    shelf.close()


@pytest.mark.parametrize("erases", [False, True])
async def test_a_slot_is_written_to_only_when_the_catalogs_file_names_it_no_more(tmp_path: Path, erases: bool) -> None:
    shelf = Shelf(tmp_path)
    shelf.blocks.record(rows(1, 2, 3))
    shelf.settle()
    if erases:
        done = asyncio.Event()
        shelf.blocks.erase((1, 3), done.set)
        await done.wait()
    else:
        shelf.blocks.forget((1, 3))
    await asyncio.to_thread(shelf.blocks.await_forgotten, (3, 1))
    named = [reading.key_at(shelf.catalog.path, shelf.folder.number, slot) is not None for slot in (1, 2, 3)]
    assert named == [False, True, False]
    shelf.close()


async def test_an_erasure_that_a_crash_interrupts_is_found_at_the_next_start(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    blocks = FolderBlocks(shelf.catalog, shelf.folder, lambda slots: tuple(slots))  # a disk that never does it
    blocks.record(rows(1, 2))
    blocks.erase((1, 2), lambda: None)
    blocks.close()
    shelf.close()
    again = Shelf(tmp_path)
    assert sorted(again.restored.unclaimed) == [1, 2]
    again.close()
