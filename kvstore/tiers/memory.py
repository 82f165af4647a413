"""Slots that lie one after the other at an address: the DRAM slab, and the arena of a machine without a GPU.

Copied by memmove, which lets go of the GIL. Slots that are neighbours on both sides go in one call: each call has to
take the GIL again, and behind a busy thread that costs more than the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from kvstore.events import TransferEnd
from kvstore.tiers.base import Landed, Run

if TYPE_CHECKING:
    from kvstore.types import Tier

CALL_BYTES = 8 * 1024 * 1024
"""Copied in one call at most: about a millisecond, the longest that a cancelled run goes on."""


class MemorySlots:
    """`num_slots` slots from an address on, and `num_extra` more behind them that are not counted."""

    def __init__(self, tier: Tier, num_slots: int, slot_bytes: int, num_extra: int = 0) -> None:
        assert num_slots >= 0
        assert num_extra >= 0
        assert slot_bytes > 0
        self.tier = tier
        self.num_slots = num_slots
        self.num_extra = num_extra
        self.slot_bytes = slot_bytes
        self._base: int | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier.name} {self.num_slots} slots of {self.slot_bytes} bytes>"

    @property
    def total_bytes(self) -> int:
        """Of all slots, the extra ones among them."""
        return (self.num_slots + self.num_extra) * self.slot_bytes

    def address(self, slot: int) -> int:
        """Of the first byte of `slot`, which may be an extra one."""
        if not 0 <= slot < self.num_slots + self.num_extra:
            raise IndexError(f"{self!r} has no slot {slot}")
        assert self._base is not None, "not open"
        return self._base + slot * self.slot_bytes

    def copy_in(self, run: Run) -> Landed:
        """From `run.host` into these slots."""
        return self._copy(run, inwards=True)

    def copy_out(self, run: Run) -> Landed:
        """From these slots into `run.host`."""
        return self._copy(run, inwards=False)

    def _copy(self, run: Run, *, inwards: bool) -> Landed:
        assert run.host.slot_bytes == self.slot_bytes
        if any(not 0 <= slot < self.num_slots for slot in run.slots):
            raise IndexError(f"{self!r} has not all slots of {run.slots}")
        hosts = [run.host.address(slot) for slot in run.host_slots]
        for first, count in spans(run.slots, run.host_slots, max(1, CALL_BYTES // self.slot_bytes)):
            if run.is_cancelled():
                return Landed(first, TransferEnd.CANCELLED)
            own = self.address(run.slots[first])
            target, source = (own, hosts[first]) if inwards else (hosts[first], own)
            ctypes.memmove(target, source, count * self.slot_bytes)
        return Landed(len(run.slots))


def spans(slots: tuple[int, ...], host_slots: tuple[int, ...], longest: int) -> Iterator[tuple[int, int]]:
    """Cut a run into (first, count) such that both sides' slots [first, first + count) are neighbours in order."""
    first = 0
    pairs = list(zip(slots, host_slots, strict=True))
    for place, ((slot, host), (next_slot, next_host)) in enumerate(pairwise(pairs), start=1):
        if (next_slot, next_host) != (slot + 1, host + 1) or place - first == longest:
            yield first, place - first
            first = place
    if pairs:
        yield first, len(pairs) - first
