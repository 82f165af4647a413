"""What the catalogue has been told of NVMe, and what free slots of it still contain (pure).

A block is told of only after the transfer that wrote it has ended, and again when its copy is
dropped, in the order in which that happened and in batches. What is dropped to make room leaves
its bytes in the slot until that is written again: they are no copy of anything any more, and
still have to go when the session they are from is deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.events import ForgetBlocks, RecordBlocks, RecordedBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.events import Action
    from kvstore.types import BlockKey


class Ledger:
    """See the module. `emit` takes the actions that are owed."""

    def __init__(self, emit: Callable[[Action], None]) -> None:
        self._emit = emit
        self._forgotten: list[int] = []
        self._to_erase: list[int] = []
        self._left_in: dict[int, BlockKey] = {}
        self._left_of: dict[BlockKey, tuple[int, ...]] = {}

    def record(self, blocks: list[RecordedBlock]) -> None:
        """These have been written."""
        if blocks:
            self.flush()
            self._emit(RecordBlocks(tuple(blocks)))

    def forget(self, slot: int) -> None:
        """The catalogue has something in `slot` that is not to be found again."""
        self._forgotten.append(slot)

    def erase(self, slot: int) -> None:
        """What is in `slot` must go, whether a copy or left over."""
        self._to_erase.append(slot)

    def leave(self, slot: int, key: BlockKey) -> None:
        """`slot` is free and contains some or all of the bytes of `key`."""
        self.overwrite((slot,))
        self._left_in[slot] = key
        self._left_of[key] = (*self._left_of.get(key, ()), slot)

    def overwrite(self, slots: Iterable[int]) -> None:
        """`slots` are about to be written or erased: what was left in them is gone."""
        for slot in slots:
            key = self._left_in.pop(slot, None)
            if key is None:
                continue
            others = tuple(other for other in self._left_of.pop(key) if other != slot)
            if others:
                self._left_of[key] = others

    def left_of(self, key: BlockKey) -> tuple[int, ...]:
        """Free slots that contain bytes of `key`."""
        return self._left_of.get(key, ())

    def flush(self) -> None:
        """Tell what is owed; before anything else that concerns the same slots."""
        if self._forgotten:
            slots, self._forgotten = tuple(self._forgotten), []
            self._emit(ForgetBlocks(slots, erase=False))
        if self._to_erase:
            slots, self._to_erase = tuple(self._to_erase), []
            self._emit(ForgetBlocks(slots, erase=True))

    @property
    def owes_nothing(self) -> bool:
        """For check()."""
        return not self._forgotten and not self._to_erase

    @property
    def left_in(self) -> set[int]:
        """Free slots that contain anything; for check()."""
        return set(self._left_in)
