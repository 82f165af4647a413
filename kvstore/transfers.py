"""Runs of blocks on their way between two tiers (pure).

    in flight --ended--> landed --parent VALID--> gone        targets become VALID
        |                   +--parent absent----> gone        targets become absent
        +--deadline, or its parent failed--> late --ended--> gone

A late transfer's targets are absent and its target slots quarantined; its source stays
pinned until it has ended. A transfer into HBM that has ended waits as *landed* until the
block before its run is VALID, so that VALID stays closed under prefixes whatever the order
in which transfers end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.events import TransferEnd
    from kvstore.tails import Tail
    from kvstore.types import TransferId

RUN_BLOCKS = 8
"""Blocks of one transfer at most: long enough to amortise its start, short enough to fail or be late alone."""


class Purpose(Enum):
    LOAD = "load"  # a turn or a hint waits for it
    DEMOTE = "demote"  # the sources leave their tier once they have a copy below
    CLEAN = "clean"  # only a copy is wanted, so that leaving costs nothing later
    SINK = "sink"  # as CLEAN, to NVMe: what should be there after a restart
    TAIL = "tail"  # private blocks of a suspended turn, out or back


@dataclass(slots=True, eq=False)
class Transfer:
    """One run, in chain order. A TAIL has an `owner` in place of `rows`."""

    id: TransferId
    purpose: Purpose
    source: Tier
    target: Tier
    rows: list[int]
    source_slots: list[int]
    target_slots: list[int]
    ring_slots: list[int]
    deadline: float
    owner: Tail | None = None
    indices: list[int] = field(default_factory=list)  # of a TAIL: where its blocks lie in the turn's table
    late: bool = False
    cancelled: bool = False
    hurried: bool = False  # a copy down that somebody waits for
    good: int | None = None  # sound blocks of the run, once it has ended
    reason: TransferEnd | None = None

    @property
    def frees_hbm(self) -> bool:
        """Are its sources slots of HBM that are free once it has ended?"""
        return self.source is Tier.HBM and (self.purpose is Purpose.DEMOTE or self.purpose is Purpose.TAIL)

    @property
    def has_ended(self) -> bool:
        return self.good is not None


class Transfers:
    """Those that have not ended, and those that have landed. Few: the directions are limited."""

    def __init__(self) -> None:
        self._by_id: dict[TransferId, Transfer] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_id.values()))

    def __getitem__(self, transfer: TransferId) -> Transfer:
        return self._by_id[transfer]

    def add(self, transfer: Transfer) -> None:
        self._by_id[transfer.id] = transfer

    def remove(self, transfer: Transfer) -> None:
        del self._by_id[transfer.id]

    def waited_for(self) -> list[Transfer]:
        """In flight and not late."""
        return [transfer for transfer in self if not transfer.late and not transfer.has_ended]

    def overdue(self, now: float) -> list[Transfer]:
        return [transfer for transfer in self.waited_for() if transfer.deadline <= now]

    def next_deadline(self) -> float | None:
        return min((transfer.deadline for transfer in self.waited_for()), default=None)

    def num_between(self, source: Tier, target: Tier) -> int:
        """IO tokens in use in this direction; a late transfer still occupies its worker."""
        return sum(t.source is source and t.target is target and not t.has_ended for t in self._by_id.values())

    def has_landing(self) -> bool:
        """Has one ended that is not late: has it landed, perhaps waiting for its parent?"""
        return any(transfer.has_ended and not transfer.late for transfer in self._by_id.values())

    def num_of(self, purpose: Purpose) -> int:
        """Those that still move bytes, late or not."""
        return sum(transfer.purpose is purpose and not transfer.has_ended for transfer in self._by_id.values())

    def with_purpose(self, purpose: Purpose) -> list[Transfer]:
        return [transfer for transfer in self.waited_for() if transfer.purpose is purpose]
