"""What the catalog's file says while slots of a full NVMe are given to other blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore import catalog_reading as reading
from kvstore.tiers.file_io import OsFileIO, libc_fallocate
from kvstore.tiers.segments import SEGMENT_NAME
from tests.faults.server import Talk, serving, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_SLOTS = 21


class WatchingFiles(OsFileIO):
    """Looks into the catalog before blocks are written: a kill right then leaves just that behind."""

    def __init__(self, catalog: Path) -> None:
        super().__init__(libc_fallocate())
        self.named: list[int] = []  # slots that were written to while the catalog's file said what they held
        self.num_written = 0
        self._catalog = catalog
        self._slabs: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        (self._slabs.add if SEGMENT_NAME.fullmatch(Path(path).name) else self._slabs.discard)(fd)
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in self._slabs and self._catalog.exists():
            stride = self.status(fd).st_size // NUM_SLOTS
            size = sum(map(len, buffers))
            for slot in range(offset // stride, -(-(offset + size) // stride)):
                self.num_written += 1
                if any(reading.key_at(self._catalog, row.number, slot) for row in reading.folders(self._catalog)):
                    self.named.append(slot)
        return super().write(fd, buffers, offset)


def test_no_slot_is_written_to_while_the_catalogs_file_says_what_it_held(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "nvme"
    files = WatchingFiles(root / "catalog.sqlite")
    with serving(settings(model, root, nvme_bytes=256 * 1024), files) as server:
        for number in range(6):
            server.say(Talk(f"mouse number {number}"))
        server.wait_for(lambda: server.live.gateway.manager.snapshot().transfers == 0)
        assert server.live.call(server.live.gateway.manager.snapshot).tiers[2].capacity == NUM_SLOTS
    assert files.num_written > 2 * NUM_SLOTS, "slots were used again"
    assert files.named == []
