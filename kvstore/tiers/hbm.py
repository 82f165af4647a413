"""The device tier: slots of the arena that the engine computes in.

Who owns the bytes of slot `n` at any time is the planner's to say; this module only moves them. On a machine without a
GPU the arena is memory like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvstore.tiers.memory import MemorySlots
from kvstore.types import Tier

if TYPE_CHECKING:
    from torch import Tensor

    from kvstore.tiers.base import SlotStore


class DeviceArena(Protocol):
    """Memory on one device: `slots` slots from the start of flat, contiguous `data`; what follows is the engine's."""

    slots: int
    data: Tensor


class HostArena(MemorySlots):
    """An arena in this process's memory; its bytes are the engine's, which has them before `open` and after `close`."""

    def __init__(self, arena: DeviceArena, slot_bytes: int) -> None:
        super().__init__(Tier.HBM, arena.slots, slot_bytes)
        assert arena.data.is_contiguous()
        assert arena.data.nbytes >= self.total_bytes
        self._data = arena.data  # as long as this object can copy, the memory is there
        self._base = arena.data.data_ptr()

    def open(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """Nothing to give back."""


def hbm_store(arena: DeviceArena, slot_bytes: int) -> SlotStore:
    """The store of `arena`, wherever it lies."""
    if arena.data.device.type == "cpu":
        return HostArena(arena, slot_bytes)
    from kvstore.tiers.cuda import CudaArena

    return CudaArena(arena, slot_bytes)
