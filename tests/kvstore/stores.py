"""What tests of copies share: memory with a pattern in it, and stores in which things go wrong."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvstore.events import TransferEnd
from kvstore.nvme_dir import ModelFolder
from kvstore.tiers.base import Landed, Run
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.nvme import NvmeStore, stride_bytes
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from random import Random

    from kvstore.tiers.base import HostMemory, SlotStore
    from kvstore.types import Tier

SLOT_BYTES = 8192
STRIDE = stride_bytes(SLOT_BYTES)
BLOCK_TOKENS = 4


@dataclass
class TorchArena:
    """A device arena and nothing else; one slot more than it has, as the engine's has."""

    slots: int
    data: torch.Tensor

    @classmethod
    def zeros(cls, slots: int, slot_bytes: int = SLOT_BYTES, device: str = "cpu") -> TorchArena:
        return cls(slots, torch.zeros((slots + 1) * slot_bytes // 2, dtype=torch.bfloat16, device=device))


def slab(num_slots: int, *, num_ring: int = 0, slot_bytes: int = SLOT_BYTES) -> DramSlab:
    """An open slab."""
    made = DramSlab(num_slots, slot_bytes, num_ring=num_ring)
    made.open()
    return made


def model_folder(path: Path, model_key: bytes = b"model key of 16.") -> ModelFolder:
    return ModelFolder(path / f"tiny-{model_key.hex()[:12]}", "tiny", model_key)


def nvme_store(folder: ModelFolder, num_slots: int, **more: Any) -> NvmeStore:
    """An open store of slots of SLOT_BYTES."""
    settings: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "make_room": lambda size: True, "io": "buffered"}
    made = NvmeStore(folder, num_slots, SLOT_BYTES, **(settings | more))
    made.open()
    return made


def pattern(seed: int, size: int = SLOT_BYTES) -> bytes:
    """Bytes that differ from any other seed's, and from slot to slot where they were shifted."""
    return (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        .numpy()
        .tobytes()
    )


def fill(host: HostMemory, slots: tuple[int, ...], seed: int = 0) -> list[bytes]:
    """Write a pattern into each of `slots`; what was written."""
    written = [pattern(seed * 1000 + place, host.slot_bytes) for place in range(len(slots))]
    for slot, data in zip(slots, written, strict=True):
        host.view(slot)[:] = data
    return written


def contents(host: HostMemory, slots: tuple[int, ...]) -> list[bytes]:
    return [bytes(host.view(slot)) for slot in slots]


def run(slots: tuple[int, ...], host: HostMemory, host_slots: tuple[int, ...]) -> Run:
    return Run(slots, host, host_slots, (None,) * len(slots))


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "little"))


def chain_run(
    slots: tuple[int, ...], host: HostMemory, host_slots: tuple[int, ...], first_block: int = 0, chain: int = 1
) -> Run:
    """Blocks [first_block, first_block + len(slots)) of a chain; equal places of one chain have equal keys."""
    names = [1000 * chain + first_block + place for place in range(len(slots))]
    parent = key(names[0] - 1) if first_block else None
    return Run(slots, host, host_slots, tuple(map(key, names)), parent=parent, first_block=first_block)


class Wrapped:
    """Another store's slots; what is overridden happens before and after its copies."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store

    @property
    def tier(self) -> Tier:
        return self._store.tier

    @property
    def num_slots(self) -> int:
        return self._store.num_slots

    @property
    def slot_bytes(self) -> int:
        return self._store.slot_bytes

    def open(self) -> None:
        self._store.open()

    def close(self) -> None:
        self._store.close()

    def copy_in(self, run: Run) -> Landed:
        return self._store.copy_in(run)

    def copy_out(self, run: Run) -> Landed:
        return self._store.copy_out(run)


class GatedStore(Wrapped):
    """Each block of a copy waits for `let_pass`; `reached` is released as often as one waits."""

    def __init__(self, store: SlotStore) -> None:
        super().__init__(store)
        self.reached = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)

    def let_pass(self, blocks: int) -> None:
        self._passes.release(blocks)

    def copy_in(self, run: Run) -> Landed:
        return self._one_by_one(run, self._store.copy_in)

    def copy_out(self, run: Run) -> Landed:
        return self._one_by_one(run, self._store.copy_out)

    def _one_by_one(self, run: Run, copy: Callable[[Run], Landed]) -> Landed:
        for place, single in enumerate(_singles(run)):
            self.reached.release()
            self._passes.acquire()
            if run.is_cancelled():
                return Landed(place, TransferEnd.CANCELLED)
            copy(single)
        return Landed(len(run.slots))


class FaultyStore(Wrapped):
    """Copies come late, end short or raise, as `random` draws it; what is not sound is left as NaN (0xFF).

    `late` is the share that takes up to `delay_seconds` more, `short` that of runs that end before their last
    block, `raising` that of runs in which the store breaks down.
    """

    def __init__(
        self,
        store: SlotStore,
        random: Random,
        *,
        late: float = 0.0,
        delay_seconds: float = 0.0,
        short: float = 0.0,
        raising: float = 0.0,
    ) -> None:
        super().__init__(store)
        self._random = random
        self._late, self._delay_seconds, self._short, self._raising = late, delay_seconds, short, raising
        self._lock = threading.Lock()
        self._garbage = slab(1, slot_bytes=store.slot_bytes)
        ctypes.memset(self._garbage.address(0), 0xFF, store.slot_bytes)
        self.num_faults = 0

    def copy_in(self, run: Run) -> Landed:
        return self._faulty(run, self._store.copy_in, self._spoil_store)

    def copy_out(self, run: Run) -> Landed:
        return self._faulty(run, self._store.copy_out, self._spoil_host)

    def _faulty(self, run: Run, copy: Callable[[Run], Landed], spoil: Callable[[Run], None]) -> Landed:
        with self._lock:
            delay = self._random.random() * self._delay_seconds if self._random.random() < self._late else 0.0
            raises = self._random.random() < self._raising
            good = len(run.slots)
            if raises or self._random.random() < self._short:
                good = self._random.randrange(max(1, good))
                self.num_faults += 1
        time.sleep(delay)
        landed = copy(_part(run, 0, good))
        spoil(_part(run, 0 if raises else landed.good, len(run.slots)))
        if raises:
            raise OSError(5, "Input/output error")
        return landed if good == len(run.slots) else Landed(landed.good, TransferEnd.FAILED)

    def _spoil_store(self, rest: Run) -> None:
        for slot in rest.slots:
            self._store.copy_in(run((slot,), self._garbage, (0,)))

    def _spoil_host(self, rest: Run) -> None:
        for slot in rest.host_slots:
            ctypes.memset(rest.host.address(slot), 0xFF, rest.host.slot_bytes)


def _part(run: Run, first: int, end: int) -> Run:
    """Blocks [first, end) of a run."""
    return Run(run.slots[first:end], run.host, run.host_slots[first:end], run.keys[first:end], run.is_cancelled)


def _singles(run: Run) -> Iterator[Run]:
    return (_part(run, place, place + 1) for place in range(len(run.slots)))
