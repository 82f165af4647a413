"""The device tier on CUDA: copies on side streams, in order with the kernels that write and read the slots.

    copy out    side stream waits for all that was launched before it: the kernel that wrote a block is among that
                (vllm #45704 copied before it had finished)
    copy in     the same wait: a kernel that still reads a slot's former block is among that (vllm #47282)
    the end     reported when the copies' event has fired, not when they were launched. So kernels that read the
                block are launched after it is there, and a slot is not reused while a copy still reads it

The waits are on the device, so they cost no more than the rest of the step under way.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from kvstore.events import TransferEnd
from kvstore.tiers.base import Landed, Run
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.tiers.hbm import DeviceArena

log = logging.getLogger(__name__)

PIN_BYTES = 32 * 1024**3
"""Pinned in one call at most: drivers refuse very large ones (FAULTS: past 512 GiB one poisoned its context)."""


class CudaArena:
    """Slots of an arena on a CUDA device. `compute` is the stream that the engine launches on."""

    def __init__(self, arena: DeviceArena, slot_bytes: int, compute: torch.cuda.Stream | None = None) -> None:
        self.tier = Tier.HBM
        self.num_slots = arena.slots
        self.slot_bytes = slot_bytes
        self._rows = arena.data.view(torch.uint8)[: arena.slots * slot_bytes].view(arena.slots, slot_bytes)
        device = arena.data.device
        self._compute = compute or torch.cuda.default_stream(device)
        self._inwards = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outwards = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Nothing to take: the arena is the engine's."""

    def close(self) -> None:
        """Nothing to give back."""

    def copy_in(self, run: Run) -> Landed:
        """From `run.host` into the device; what is launched once this returned sees the blocks."""
        return self._copy(run, self._inwards, inwards=True)

    def copy_out(self, run: Run) -> Landed:
        """From the device into `run.host`, behind the kernels that were launched before this call."""
        return self._copy(run, self._outwards, inwards=False)

    def _copy(self, run: Run, stream: torch.cuda.Stream, *, inwards: bool) -> Landed:
        for slot in run.slots:
            if not 0 <= slot < self.num_slots:
                raise IndexError(f"the arena has no slot {slot}")
        hosts = [torch.frombuffer(run.host.view(slot), dtype=torch.uint8) for slot in run.host_slots]
        try:
            launched = self._launch(run, hosts, stream, inwards=inwards)
        except RuntimeError:
            log.exception("copying %d blocks %s the device failed", len(run.slots), "to" if inwards else "from")
            # Copies launched before the failure may still be writing; the transfer has ended only once they have.
            with contextlib.suppress(RuntimeError):
                stream.synchronize()
            return Landed(0, TransferEnd.FAILED)
        return Landed(launched, TransferEnd.DONE if launched == len(run.slots) else TransferEnd.CANCELLED)

    def _launch(self, run: Run, hosts: list[torch.Tensor], stream: torch.cuda.Stream, *, inwards: bool) -> int:
        """Launch the copies and wait until they have happened; how many they were."""
        launched = 0
        with torch.cuda.stream(stream):
            stream.wait_stream(self._compute)
            for slot, host in zip(run.slots, hosts, strict=True):
                if run.is_cancelled():
                    break
                row = self._rows[slot]
                target, source = (row, host) if inwards else (host, row)
                target.copy_(source, non_blocking=True)
                launched += 1
            # blocking: this thread sleeps, where the default would spin and hold a core.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        event.synchronize()
        return launched


class CudaPinning:
    """Host memory pinned for the current CUDA context (kvstore.tiers.dram.Pinning).

    torch's own pinned tensors are rounded up to a power of two: up to twice the memory (vllm #53042).
    """

    def __init__(self) -> None:
        self._pinned: list[int] = []

    def pin(self, address: int, size: int, unit: int) -> None:
        """Pin [address, address + size) in pieces of whole `unit`s.

        Raises:
            MemoryError: the driver refuses; nothing stays pinned.
        """
        piece = max(1, PIN_BYTES // unit) * unit
        for start in range(0, size, piece):
            code = int(_driver().cudaHostRegister(address + start, min(piece, size - start), 0))
            if code != 0:
                self.unpin()
                raise MemoryError(f"cudaHostRegister says {code} after {start} bytes")
            self._pinned.append(address + start)

    def unpin(self) -> None:
        """Let go of all that was pinned."""
        while self._pinned:
            _driver().cudaHostUnregister(self._pinned.pop())


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
