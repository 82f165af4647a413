"""The parts of the store below turns, and the few operations that need more than one of them (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.events import Miss
from kvstore.residency import Residency
from kvstore.room import Room
from kvstore.tails import Tails
from kvstore.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.config import PlannerConfig
    from kvstore.events import Action, TransferDone


class Store:
    """Blocks and their tiers, transfers, room and tails; knows no turns."""

    def __init__(self, config: PlannerConfig, emit: Callable[[Action], None]) -> None:
        self.blocks = Residency(config, emit)
        self.traffic = Traffic(self.blocks, config, emit)
        self.room = Room(self.blocks, self.traffic)
        self.tails = Tails(self.blocks, self.traffic, self.room)

    def publish(self, row: int, slot: int) -> None:
        """A turn has filled its OPEN HBM `slot` with the block of `row`, which is not VALID in HBM."""
        self.blocks.publish(row, slot)
        self.traffic.land()  # it may be what a landed run was waiting for

    def finish(self, event: TransferDone) -> None:
        """A transfer has ended."""
        transfer = self.traffic.note_end(event.transfer, event.good, event.reason)
        if transfer.owner is None:
            self.traffic.settle(transfer)
        else:
            self.tails.end(transfer, transfer.owner)

    def expire(self) -> None:
        """Wait no longer for transfers that are past their deadline."""
        for transfer in self.traffic.transfers.overdue(self.blocks.rows.now):
            if transfer.late:
                continue  # given up with the run it continues
            self.traffic.count_late(transfer)
            if transfer.owner is None:
                self.traffic.give_up(transfer, Miss.LOAD_TIMEOUT)
            else:
                self.tails.give_up(transfer, transfer.owner)
