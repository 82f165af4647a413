"""Host memory: one slab of slots, and behind them the staging ring.

    [ slot 0 ... slot num_slots - 1 | ring up 0 ... n - 1 | ring down n ... 2n - 1 ]
      DRAM's capacity, the planner's   pass blocks between NVMe and HBM when DRAM has no room

Private anonymous memory, so that it takes no more of the machine than was ever written: an idle server's slab costs
nothing. On CUDA it is pinned, which touches all of it at once.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

from kvstore.errors import SettingInvalid
from kvstore.tiers.memory import MemorySlots
from kvstore.types import SLOT_ALIGNMENT, Tier

FLAG = "--dram-bytes"


class Pinning(Protocol):
    """Makes memory readable by a device's copy engine, piece by piece."""

    def pin(self, address: int, size: int, unit: int) -> None:
        """Pin [address, address + size); no copy crosses a multiple of `unit` from `address` on.

        Raises:
            MemoryError: the driver refuses; nothing stays pinned.
        """

    def unpin(self) -> None:
        """Let go of all that was pinned."""


class DramSlab(MemorySlots):
    """`num_slots` slots for blocks that sleep in DRAM; `num_ring` more, each way, outside that capacity."""

    def __init__(self, num_slots: int, slot_bytes: int, *, num_ring: int = 0, pinning: Pinning | None = None) -> None:
        assert slot_bytes % SLOT_ALIGNMENT == 0, "direct IO and pinning work in pages"
        super().__init__(Tier.DRAM, num_slots, slot_bytes, num_extra=2 * num_ring)
        self._pinning = pinning
        self._memory: mmap.mmap | None = None

    def ring_slots(self, ring: Sequence[int]) -> tuple[int, ...]:
        """Slots of this slab that the planner's ring slots are."""
        return tuple(self.num_slots + place for place in ring)

    @property
    def ring_bytes(self) -> int:
        """Of the staging ring, both ways: not part of DRAM's budget."""
        return self.num_extra * self.slot_bytes

    def open(self) -> None:
        """Map the slab, and pin it where a device copies from it.

        Raises:
            SettingInvalid: the machine does not have that much; names --dram-bytes.
        """
        if not self.total_bytes or self._memory is not None:
            return
        try:
            # Not the default MAP_SHARED, which is a file in /dev/shm's budget and takes no huge pages.
            self._memory = mmap.mmap(-1, self.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as exc:
            raise SettingInvalid(FLAG, f"{self.total_bytes} bytes cannot be mapped: {exc}; give less") from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise_huge_pages()
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pin()

    def _advise_huge_pages(self) -> None:
        """Fewer page faults when slots are first written; a kernel built without them says EINVAL."""
        assert self._memory is not None
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return

    def _pin(self) -> None:
        if self._pinning is None or self._base is None:
            return
        try:
            self._pinning.pin(self._base, self.total_bytes, self.slot_bytes)
        except MemoryError as exc:
            self._pinning = None
            self.close()
            raise SettingInvalid(FLAG, f"{self.total_bytes} bytes cannot be pinned: {exc}; give less") from exc

    def view(self, slot: int, count: int = 1) -> memoryview:
        """Slots [slot, slot + count), writable, as bytes; keeps them mapped."""
        if not (slot >= 0 and count >= 1 and slot + count <= self.num_slots + self.num_extra):
            raise IndexError(f"{self!r} has no slots [{slot}, {slot + count})")
        assert self._memory is not None, "not open"
        return memoryview(self._memory)[slot * self.slot_bytes : (slot + count) * self.slot_bytes]

    def close(self) -> None:
        """Unpin and unmap; what a view still holds is unmapped when that view goes."""
        memory, self._memory, self._base = self._memory, None, None
        if memory is None:
            return
        if self._pinning is not None:
            self._pinning.unpin()
        try:
            memory.close()
        except BufferError:
            # A read that hangs in a dead disk still has its target here; unmapping under it would end the process.
            return
