"""Private blocks of suspended turns: what they had computed and could not publish (pure).

Mostly the one partial block at a turn's end; every block of a turn that asked for no cache.
They lie in turn-private OPEN slots of DRAM and come back as they were, so that nothing is
computed again. If any of a tail is lost, the rest is of no use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.policy import Kind
from kvstore.transfers import RUN_BLOCKS
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.residency import Residency
    from kvstore.room import Room
    from kvstore.traffic import Traffic
    from kvstore.transfers import Transfer

_WORTH = (Kind.PINNED + 1, 0.0)  # more than any cached block: nothing else has a copy of this


@dataclass(slots=True, eq=False)
class Tail:
    """Blocks `[first_index, first_index + num_blocks)` of one turn's table, whose K/V end at token `tokens`."""

    first_index: int
    num_blocks: int
    tokens: int
    dram: dict[int, int] = field(default_factory=dict)  # index -> OPEN slot, once it is there
    hbm: dict[int, int] = field(default_factory=dict)  # index -> OPEN slot, once it is back
    num_pending: int = 0  # transfers under way
    is_lost: bool = False

    @property
    def is_away(self) -> bool:
        """Whole, and in DRAM."""
        return not self.is_lost and len(self.dram) == self.num_blocks

    @property
    def is_back(self) -> bool:
        """Whole, and in HBM."""
        return not self.is_lost and len(self.hbm) == self.num_blocks

    def slots_in(self, tier: Tier) -> list[int]:
        """OPEN slots it owns in `tier`."""
        if tier is Tier.HBM:
            return list(self.hbm.values())
        return list(self.dram.values()) if tier is Tier.DRAM else []


class Tails:
    """Tails that hold any slot."""

    def __init__(self, blocks: Residency, traffic: Traffic, room: Room) -> None:
        self._blocks = blocks
        self._traffic = traffic
        self._room = room
        self._tails: set[Tail] = set()

    def __iter__(self) -> Iterator[Tail]:
        return iter(self._tails)

    def put_away(self, first_index: int, slots: list[int], tokens: int, tenant: int) -> Tail | None:
        """Copy a stopped turn's OPEN HBM slots to private DRAM slots; None, and they are free, if there is no room.

        The HBM slots are free once the copy has ended.
        """
        dram: list[int] = []
        if self._blocks.takes(Tier.DRAM):
            dram = self._room.slots_in(Tier.DRAM, len(slots), _WORTH, tenant)
        if len(dram) < len(slots):
            if dram:
                self._blocks.pools[Tier.DRAM].close(dram)
            self._blocks.hbm.close(slots)
            self._blocks.totals.tails_lost += 1
            return None
        tail = Tail(first_index, len(slots), tokens)
        self._tails.add(tail)
        self._blocks.totals.tails_kept += 1
        self._move(tail, Tier.HBM, slots, Tier.DRAM, dram, self._traffic.soon())
        return tail

    def bring_back(self, tail: Tail, slots: list[int], deadline: float) -> None:
        """Copy a tail that is away into OPEN HBM `slots`."""
        self._move(tail, Tier.DRAM, [tail.dram[index] for index in sorted(tail.dram)], Tier.HBM, slots, deadline)

    def recall(self, tail: Tail) -> None:
        """Let `tail` stay in DRAM after all: whatever part of it has come back, or is about to, is dropped."""
        self._blocks.hbm.close(list(tail.hbm.values()))
        tail.hbm.clear()
        for transfer in self._traffic.transfers:
            if transfer.owner is tail and not transfer.late:
                self._abandon(transfer)

    def take(self, tail: Tail) -> list[int]:
        """The OPEN HBM slots of a tail that is back, for its turn; its slots in DRAM are free."""
        slots = [tail.hbm[index] for index in sorted(tail.hbm)]
        tail.hbm.clear()
        self._tails.discard(tail)
        self.forget(tail)
        return slots

    def forget(self, tail: Tail) -> None:
        """Free its slots, those in transfer once that has ended."""
        tail.is_lost = True
        self._settle(tail)

    def end(self, transfer: Transfer, tail: Tail) -> None:
        """A transfer of `tail` has ended."""
        self._traffic.transfers.remove(transfer)
        tail.num_pending -= 1
        targets = self._blocks.pools[transfer.target]
        if transfer.late:
            for slot in transfer.target_slots:
                targets.leave_quarantine(slot)
        else:
            targets.finish_private_fill(transfer.target_slots)
            arrived = tail.dram if transfer.target is Tier.DRAM else tail.hbm
            arrived.update(zip(transfer.indices, transfer.target_slots, strict=True))
            tail.is_lost = tail.is_lost or transfer.good != len(transfer.source_slots)
            if transfer.target is Tier.DRAM:
                self._blocks.count_written(Tier.DRAM, transfer.good or 0)
        if transfer.source is Tier.HBM:
            self._blocks.hbm.close(transfer.source_slots)
            if not transfer.late:
                self._traffic.note_gone(transfer)
        self._settle(tail)

    def give_up(self, transfer: Transfer, tail: Tail) -> None:
        """A transfer of `tail` is past its deadline."""
        self._abandon(transfer)
        self.forget(tail)

    def _move(
        self, tail: Tail, source: Tier, sources: list[int], target: Tier, targets: list[int], deadline: float
    ) -> None:
        for start in range(0, len(sources), RUN_BLOCKS):
            run = slice(start, start + RUN_BLOCKS)
            first = tail.first_index + start
            indices = list(range(first, first + len(sources[run])))
            tail.num_pending += 1
            self._traffic.begin_private(tail, indices, source, sources[run], target, targets[run], deadline)

    def _abandon(self, transfer: Transfer) -> None:
        transfer.late = True
        self._traffic.note_gone(transfer)
        self._blocks.pools[transfer.target].abandon_private_fill(transfer.target_slots)
        self._traffic.cancel(transfer)

    def _settle(self, tail: Tail) -> None:
        """Free what is left of a lost tail, once nothing reads or writes it any more."""
        if not tail.is_lost or tail.num_pending:
            return
        self._blocks.totals.tails_lost += tail in self._tails
        self._tails.discard(tail)
        self._blocks.hbm.close(list(tail.hbm.values()))
        if tail.dram:
            self._blocks.pools[Tier.DRAM].close(list(tail.dram.values()))
        tail.hbm.clear()
        tail.dram.clear()
