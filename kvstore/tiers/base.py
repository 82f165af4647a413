"""What every tier is to the one above it: equal slots that blocks are copied into and out of.

One side of every copy is memory of this process (DRAM, or a staging slot); the other is a store, near or far. So a
device, a disk and an object store on another machine fit alike: none is asked for an address, and each gets the keys.

What moves bytes blocks, runs on a worker thread, and does not raise for what a medium does: it says how many
blocks of the run are sound, and why not more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.events import TransferEnd

if TYPE_CHECKING:
    from kvstore.types import BlockKey, Tier


class HostMemory(Protocol):
    """Slots of this process's memory; an address stays valid until the memory is closed."""

    @property
    def slot_bytes(self) -> int: ...

    def address(self, slot: int) -> int:
        """Of the first byte of `slot`; slot `n + 1` follows on slot `n`.

        Raises:
            IndexError: there is no such slot.
        """

    def view(self, slot: int, count: int = 1) -> memoryview:
        """Slots [slot, slot + count), writable, as bytes. While it lives, closing does not unmap them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks to copy between a store's `slots` and the `host_slots` of `host`, pairwise and in this order.

    `keys` has None for a private block. Where the run lies in its chain, `parent` and `first_block` say as in
    kvstore.events.StartTransfer: a store that outlives the process keeps that with the blocks. `is_cancelled` is asked
    between blocks: once it says yes, what has not been copied need not be.
    """

    slots: tuple[int, ...]
    host: HostMemory
    host_slots: tuple[int, ...]
    keys: tuple[BlockKey | None, ...]
    is_cancelled: Callable[[], bool] = bool  # bool() is False: never
    parent: BlockKey | None = None
    first_block: int = 0

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.host_slots) == len(self.keys)


@dataclass(frozen=True, slots=True)
class Landed:
    """Blocks [0, `good`) of a run are sound; `reason` says why the rest is not (kvstore.events.TransferDone)."""

    good: int
    reason: TransferEnd = TransferEnd.DONE


class SlotStore(Protocol):
    """`num_slots` slots of `slot_bytes` bytes, numbered from 0.

    A copy of a run whose slots do not exist is our own mistake and raises IndexError before any byte has moved.
    """

    @property
    def tier(self) -> Tier: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    def open(self) -> None:
        """Take the memory, file or connection; blocking.

        Raises:
            SettingInvalid: it cannot be had; names the setting to change.
        """

    def close(self) -> None:
        """Give it back, once no copy is under way any more. Closing twice is closing once."""

    def copy_in(self, run: Run) -> Landed:
        """From `run.host` into this store; returns when the sound blocks can be read by whoever reads this tier."""

    def copy_out(self, run: Run) -> Landed:
        """From this store into `run.host`; returns when the sound blocks are there."""
