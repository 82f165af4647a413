"""A catalog of some moment beside slabs of another: whatever a crash, or a loss of power, has mixed, no word is wrong.

No write of slots is ever waited for, so nothing may depend on their order. A run is recorded, write by write, with
copies of its catalog in between; then any catalog meets any subset of the writes, some of them torn, and the talks
go on.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import catalog_reading as reading
from kvstore.catalog_file import connect
from kvstore.nvme_dir import NvmeDirectory
from kvstore.tiers.file_io import OsFileIO
from kvstore.tiers.segments import SEGMENT_NAME
from kvstore.types import SLOT_ALIGNMENT, Tier
from tests.crash.store import MODEL, SEGMENT_SLOTS, STRIDE, Form, Open, opened
from tests.crash.talk import Talk

NUM_TALKS = 14
NUM_TURNS = 5
NUM_MIXTURES = 24
FORM = Form(hbm_slots=40, dram_slots=12, nvme_slots=70)


@dataclass(slots=True)
class Write:
    """Bytes that went to a file of slots; zeros where it was an erasure."""

    file: str
    offset: int
    data: bytes


@dataclass(slots=True)
class Recorded:
    """A run: all writes in order, and copies of the catalog, each with the number of writes there were before it."""

    writes: list[Write] = field(default_factory=list)
    catalogs: list[tuple[int, Path]] = field(default_factory=list)


class RecordingFiles(OsFileIO):
    """The operating system's files; writes of slots are kept."""

    def __init__(self, writes: list[Write]) -> None:
        super().__init__()
        self._writes = writes
        self._names: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._names[fd] = Path(path).name
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        moved = super().write(fd, buffers, offset)
        if SEGMENT_NAME.fullmatch(self._names[fd]):
            self._writes.append(Write(self._names[fd], offset, b"".join(buffers)[:moved]))
        return moved

    def zero(self, fd: int, offset: int, length: int) -> None:
        super().zero(fd, offset, length)
        self._writes.append(Write(self._names[fd], offset, bytes(length)))


async def record(place: Path, seed: int) -> Recorded:
    """Talks in random order, more than NVMe holds; one in seven is deleted in the end."""
    it = Recorded()
    chance = random.Random(f"{seed} run")
    talks = [Talk(seed, number) for number in range(NUM_TALKS)]
    order = [talk for talk in talks for _ in range(NUM_TURNS)]
    chance.shuffle(order)
    turns: Counter[int] = Counter()
    async with opened(place / "nvme", FORM, RecordingFiles(it.writes)) as store:
        for number, talk in enumerate(order):
            turn = turns[talk.number]
            await store.turn(talk.name, talk.prompt(turn), len(talk.answer(turn)))
            turns[talk.number] += 1
            if number % 10 == 9:
                await _copy(store, place / f"catalog-{number}", it)
        for talk in talks[::7]:
            store.keeper.forget("", talk.name)
        await store.until_idle()
        await _copy(store, place / "catalog-end", it)
    return it


async def _copy(store: Open, path: Path, it: Recorded) -> None:
    """Of the catalog as it is committed now; what was written meanwhile counts as later."""
    await store.keeper.settled()
    before = len(it.writes)

    def copy() -> None:
        with (
            closing(connect(store.tier.disk.catalog.path, read_only=True)) as here,
            closing(sqlite3.connect(path)) as there,
        ):
            here.backup(there)

    await asyncio.to_thread(copy)
    it.catalogs.append((before, path))


def mix(root: Path, it: Recorded, chance: random.Random) -> None:
    """One catalog and a subset of writes: those before it whole and later ones perhaps, or any."""
    before, catalog = chance.choice(it.catalogs)
    share, torn = chance.choice([0.0, 0.5, 0.9, 1.0]), chance.choice([0.0, 0.0, 0.1])
    is_ordered = chance.random() < 0.5
    directory = NvmeDirectory(root)
    directory.open()
    slabs = directory.folder("digests", MODEL).slabs
    directory.catalog.write_bytes(catalog.read_bytes())
    directory.close()
    files = {write.file: bytearray(SEGMENT_SLOTS * STRIDE) for write in it.writes}
    for number, write in enumerate(it.writes):
        if (is_ordered and number < before) or chance.random() < share:
            for start in range(0, len(write.data), SLOT_ALIGNMENT):
                if chance.random() >= torn:
                    page = write.data[start : start + SLOT_ALIGNMENT]
                    files[write.file][write.offset + start : write.offset + start + len(page)] = page
    for name, data in files.items():
        first = int(name[:-3]) * SEGMENT_SLOTS
        (slabs / name).write_bytes(data[: (FORM.nvme_slots - first) * STRIDE])


async def go_on(root: Path, seed: int, chance: random.Random, counts: Counter[str]) -> None:
    """Every talk that the catalog knows says what it would have said; as it knows it, or as its client does."""
    known = {session.id: session.turns for session in reading.listing(root / "catalog.sqlite")}
    async with opened(root, FORM) as store:
        store.check()
        for number in range(NUM_TALKS):
            talk = Talk(seed, number)
            turn = chance.choice([known.get(talk.name, 0), NUM_TURNS])
            said = await store.turn(talk.name, talk.prompt(turn), len(talk.answer(turn)))
            assert said.output == talk.answer(turn), f"talk {number} said something else in turn {turn}"
            counts["reused"] += said.reused.get(Tier.NVME, 0)
        await store.until_idle()
        store.check_idle()
        totals = store.manager.snapshot().totals
        counts["corrupt"] += totals.corrupt
        counts["stale"] += totals.stale


async def test_any_catalog_with_any_subset_of_writes_makes_misses_and_no_wrong_word(tmp_path: Path) -> None:
    seed = 4 if os.environ.get("CI") == "true" else random.randrange(10**6)
    it = await record(tmp_path, seed)
    assert len(it.writes) > FORM.nvme_slots, "no slot was used again"
    counts: Counter[str] = Counter()
    for number in range(NUM_MIXTURES):
        chance, root = random.Random(f"{seed} {number}"), tmp_path / str(number)
        try:
            mix(root, it, chance)
            await go_on(root, seed, chance, counts)
        except BaseException as error:
            error.add_note(f"mixture {number} of seed {seed}")
            raise
    print(counts)
    assert counts["reused"] > 0
    assert counts["corrupt"] > 0
    assert counts["stale"] > 0
