"""Transfers from their start to their end, and what either does to rows and slots (pure).

Every slot is reserved before bytes move and every source pinned until its transfer has
ended. Whatever goes wrong with a transfer, its target becomes absent and its source stays;
runs that would then lie below a gap in HBM are given up with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.events import CancelTransfer, HurryTransfer, Miss, StartTransfer, TransferEnd
from kvstore.rows import NO_ROW
from kvstore.transfers import Purpose, Transfer, Transfers
from kvstore.types import Tier, TransferId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.config import PlannerConfig
    from kvstore.events import Action
    from kvstore.residency import Residency
    from kvstore.tails import Tail

_STALE: Final = {
    TransferEnd.STALE: Miss.STALE,
    TransferEnd.OTHER_MODEL: Miss.OTHER_MODEL,
    TransferEnd.OTHER_FORMAT: Miss.OTHER_FORMAT,
}
_OF_THE_MEDIUM: Final = (TransferEnd.FAILED, TransferEnd.SLOT_BROKEN)
"""A tier that cannot be read is not given anything new for a while, and seen to be suspect."""
_MISSES: Final = {TransferEnd.CORRUPT: Miss.CORRUPT, **_STALE}
"""Ends of a load that say more than that it failed."""


class Traffic:
    """Transfers under way, and the IO tokens and ring slots they hold."""

    def __init__(self, blocks: Residency, config: PlannerConfig, emit: Callable[[Action], None]) -> None:
        self.transfers = Transfers()
        self.coming = 0  # slots of HBM that copies down under way will free
        self._blocks = blocks
        self._config = config
        self._emit = emit
        self._ring_up = list(range(config.ring_slots))
        self._ring_down = list(range(config.ring_slots, 2 * config.ring_slots))
        self._next_id = 0

    def has_io_token(self, source: Tier, target: Tier) -> bool:
        return self.transfers.num_between(source, target) < self._config.max_transfers

    def is_moving(self, source: Tier, target: Tier) -> bool:
        """Will a transfer in this direction end, as far as is known?"""
        return any(t.source is source and t.target is target for t in self.transfers.waited_for())

    def is_copying_hbm(self) -> bool:
        """Does any transfer, even a late one, still use slots of HBM?"""
        return any(Tier.HBM in (t.source, t.target) for t in self.transfers)

    def num_ring_slots(self, source: Tier, target: Tier) -> int:
        """Blocks that can pass between the two now, as far as ring slots go."""
        if {source, target} != {Tier.HBM, Tier.NVME}:
            return self._blocks.pools[target].capacity
        return len(self._ring_up if source is Tier.NVME else self._ring_down)

    # --- starts -----------------------------------------------------------------------

    def begin(
        self,
        purpose: Purpose,
        source: Tier,
        target: Tier,
        run: Sequence[int],
        slots: list[int],
        deadline: float | None = None,
    ) -> None:
        """Start to copy `run`, VALID in `source`, into OPEN `slots` of `target`; in time for `deadline`, or soon."""
        sources, targets = self._blocks.pools[source], self._blocks.pools[target]
        for row, slot in zip(run, slots, strict=True):
            targets.begin_fill(row, slot)
        sources.pin(run[-1])
        targets.pin(run[-1])
        ring: list[int] = []
        if {source, target} == {Tier.HBM, Tier.NVME}:
            free = self._ring_up if source is Tier.NVME else self._ring_down
            ring = [free.pop() for _ in slots]
        self._send(
            Transfer(
                id=TransferId(self._next_id),
                purpose=purpose,
                source=source,
                target=target,
                rows=list(run),
                source_slots=[sources.slot(row) for row in run],
                target_slots=slots,
                ring_slots=ring,
                deadline=self.soon() if deadline is None else deadline,
            )
        )

    def begin_private(
        self,
        tail: Tail,
        indices: list[int],
        source: Tier,
        sources: list[int],
        target: Tier,
        slots: list[int],
        deadline: float,
    ) -> None:
        """Start to copy blocks `indices` of a suspended turn; both ends are OPEN slots that belong to `tail`."""
        self._blocks.pools[target].begin_private_fill(slots)
        self._send(
            Transfer(
                id=TransferId(self._next_id),
                purpose=Purpose.TAIL,
                source=source,
                target=target,
                rows=[],
                source_slots=sources,
                target_slots=slots,
                ring_slots=[],
                deadline=deadline,
                owner=tail,
                indices=indices,
            )
        )

    def soon(self) -> float:
        """The deadline of copies down."""
        return self._blocks.rows.now + self._config.demote_deadline_seconds

    def note_gone(self, transfer: Transfer) -> None:
        """It will free no slots, or has just done so."""
        if transfer.frees_hbm:
            self.coming -= len(transfer.source_slots)
        self._note_leaving(transfer, -len(transfer.rows))

    def _note_leaving(self, transfer: Transfer, blocks: int) -> None:
        if transfer.purpose is Purpose.DEMOTE:
            tenant = self._blocks.rows.tenant[transfer.rows[0]]
            self._blocks.pools[transfer.source].shares.leaving[tenant] += blocks

    def _send(self, transfer: Transfer) -> None:
        self._next_id += 1
        if transfer.frees_hbm:
            self.coming += len(transfer.source_slots)
        elif transfer.purpose is Purpose.LOAD:
            self._blocks.cost.reads[transfer.source].begin(len(transfer.rows), self._blocks.rows.now)
        self._note_leaving(transfer, len(transfer.rows))
        self.transfers.add(transfer)
        rows = self._blocks.rows
        keys = tuple(map(rows.key, transfer.rows))
        parent = rows.parent[transfer.rows[0]] if keys else NO_ROW
        self._emit(
            StartTransfer(
                transfer=transfer.id,
                source=transfer.source,
                target=transfer.target,
                source_slots=tuple(transfer.source_slots),
                target_slots=tuple(transfer.target_slots),
                keys=keys if keys else (None,) * len(transfer.source_slots),
                deadline=transfer.deadline,
                ring_slots=tuple(transfer.ring_slots),
                parent=None if parent == NO_ROW else rows.key(parent),
                first_block=rows.depth[transfer.rows[0]] if keys else 0,
            )
        )

    # --- ends -------------------------------------------------------------------------

    def cancel(self, transfer: Transfer) -> None:
        """Nobody waits for it; it still ends, well or not."""
        if not transfer.cancelled and not transfer.has_ended:
            transfer.cancelled = True
            self._emit(CancelTransfer(transfer.id))

    def hurry(self) -> None:
        """Somebody waits for slots of HBM: copies out of it, which free or at least release them, may not yield."""
        for transfer in self.transfers:
            if transfer.source is Tier.HBM and not (transfer.hurried or transfer.late or transfer.has_ended):
                transfer.hurried = True
                self._emit(HurryTransfer(transfer.id))

    def cancel_loads_except(self, wanted: set[int]) -> None:
        """Cancel loads that bring none of the rows `wanted`."""
        for transfer in self.transfers.with_purpose(Purpose.LOAD):
            if wanted.isdisjoint(transfer.rows):
                self.cancel(transfer)

    def note_end(self, transfer_id: TransferId, good: int, reason: TransferEnd) -> Transfer:
        """The transfer has ended with the first `good` blocks sound: its ring slots and IO token are free."""
        transfer = self.transfers[transfer_id]
        transfer.good, transfer.reason = good, reason
        if transfer.purpose is Purpose.LOAD:
            self._blocks.cost.reads[transfer.source].end(len(transfer.rows), good, self._blocks.rows.now)
        (self._ring_up if transfer.source is Tier.NVME else self._ring_down).extend(transfer.ring_slots)
        return transfer

    def settle(self, transfer: Transfer) -> None:
        """Let go of the sources of a transfer that has ended, and publish what it brought."""
        self._blocks.pools[transfer.source].unpin(transfer.rows[-1])
        if transfer.late:
            self.transfers.remove(transfer)
            self._leave_quarantine(transfer, transfer.target_slots)
            for row, slot in self._targets(transfer):
                self._leave_in(transfer, row, slot)
        else:
            self.land()
            if transfer.reason is TransferEnd.DONE and transfer.source > transfer.target:
                self._blocks.health.note_read(transfer.source)
        self._blame(transfer)
        self._blocks.rows.forget_unused(transfer.rows[-1])

    def land(self) -> None:
        """Publish what transfers have brought, each run once the block before it is VALID."""
        while self.transfers.has_landing():
            ready = [t for t in self.transfers if t.has_ended and not t.late and not self._waits_for_parent(t)]
            if not ready:
                return
            self._land(ready[0])

    def give_up(self, transfer: Transfer, miss: Miss) -> None:
        """Wait no longer: its targets are absent from now on, and so are those of runs that continue it in HBM."""
        pool = self._blocks.pools[transfer.target]
        filling = [row for row, slot in self._targets(transfer) if pool.slot(row) == slot]
        overtaken = [slot for row, slot in self._targets(transfer) if pool.slot(row) != slot]
        transfer.late = True
        self._make_absent(transfer, filling, miss)
        self.note_gone(transfer)
        if transfer.has_ended:
            self.transfers.remove(transfer)
            self._leave_quarantine(transfer, overtaken)
        else:
            self.cancel(transfer)
        for row in reversed(filling):
            self._blocks.rows.forget_unused(row)

    def _waits_for_parent(self, transfer: Transfer) -> bool:
        parent = self._blocks.rows.parent[transfer.rows[0]]
        return transfer.target is Tier.HBM and parent != NO_ROW and self._blocks.hbm.is_filling(parent)

    def _land(self, transfer: Transfer) -> None:
        assert transfer.good is not None
        self.transfers.remove(transfer)
        pool = self._blocks.pools[transfer.target]
        unsound, num_arrived = [], 0
        for index, (row, slot) in enumerate(self._targets(transfer)):
            if pool.slot(row) != slot:
                pool.leave_quarantine(slot)  # a turn's own fill has overtaken it
            elif index < transfer.good:
                self._blocks.arrive(transfer.target, row)
                self._note_arrival(transfer, row)
                num_arrived += 1
            else:
                unsound.append(row)
        self._count_arrivals(transfer, num_arrived)
        if transfer.target is Tier.NVME:
            self._blocks.record(transfer.rows[: transfer.good])
        self._make_absent(transfer, unsound, Miss.LOAD_FAILED)
        if transfer.purpose is Purpose.DEMOTE:
            self._leave_after_copy(transfer)
        for row in reversed(unsound):
            self._blocks.rows.forget_unused(row)

    def _make_absent(self, transfer: Transfer, rows: list[int], miss: Miss) -> None:
        """`rows`, FILLING by this transfer, do not come; it does not protect what it brings any longer."""
        pool = self._blocks.pools[transfer.target]
        if rows:
            self._blocks.num_faults += 1
            self._give_up_below(rows, miss)
        pool.unpin(transfer.rows[-1])
        if not transfer.late and transfer.reason is not None:
            miss = _MISSES.get(transfer.reason, miss)
        for row in reversed(rows):
            slot = pool.slot(row)
            pool.abandon_fill(row, transfer.has_ended)
            if transfer.has_ended:
                self._leave_in(transfer, row, slot)
            # A load that was called off is no fault of its blocks: who joined it meanwhile starts another.
            if transfer.purpose is Purpose.LOAD and transfer.reason is not TransferEnd.CANCELLED:
                self._blocks.misses[row] = miss
        if transfer.purpose is Purpose.SINK or (transfer.target is Tier.NVME and self._blocks.dirty.all_due):
            self._blocks.dirty.make_due(rows)

    def _leave_in(self, transfer: Transfer, row: int, slot: int) -> None:
        """`slot` is free again, and `row` not in it."""
        is_broken = transfer.reason is TransferEnd.SLOT_BROKEN and slot in transfer.target_slots[transfer.good :][:1]
        if not is_broken:
            self._blocks.leave_in(transfer.target, slot, row)

    def _give_up_below(self, rows: list[int], miss: Miss) -> None:
        """Give up runs into HBM that continue one of `rows`, which does not come."""
        hbm, parents = self._blocks.hbm, self._blocks.rows.parent
        for other in self.transfers:
            if other.target is Tier.HBM and other.rows and not other.late:
                parent = parents[other.rows[0]]
                if parent in rows and hbm.is_filling(parent):
                    self.give_up(other, miss)

    def _leave_after_copy(self, transfer: Transfer) -> None:
        """A demotion has ended: its sources leave, tail first, as far as they have a copy and nobody wants them."""
        blocks, source = self._blocks, transfer.source
        self.note_gone(transfer)
        for row in reversed(transfer.rows):
            if not blocks.pools[source].may_leave(row) or not blocks.has_copy_below(source, row):
                return
            blocks.totals.released += source is Tier.HBM
            blocks.drop(source, row)

    def _leave_quarantine(self, transfer: Transfer, slots: list[int]) -> None:
        for slot in slots:
            self._blocks.pools[transfer.target].leave_quarantine(slot)

    def _targets(self, transfer: Transfer) -> Iterator[tuple[int, int]]:
        return zip(transfer.rows, transfer.target_slots, strict=True)

    # --- what follows -----------------------------------------------------------------

    def _note_arrival(self, transfer: Transfer, row: int) -> None:
        blocks = self._blocks
        if transfer.target is Tier.HBM:
            blocks.refresh_below(row)
        if transfer.purpose is Purpose.LOAD:
            blocks.rows.origin[row] = max(blocks.rows.origin[row], transfer.source)

    def _count_arrivals(self, transfer: Transfer, count: int) -> None:
        blocks, totals = self._blocks, self._blocks.totals
        if transfer.purpose is Purpose.LOAD:
            totals.loaded += count
            blocks.count_read(transfer.source, count)
            return
        blocks.count_written(transfer.target, count)
        if transfer.purpose is Purpose.DEMOTE:
            totals.demoted += count
        elif transfer.purpose is Purpose.CLEAN:
            totals.cleaned += count
        else:
            totals.sunk += count

    def count_late(self, transfer: Transfer) -> None:
        """Its deadline has passed: a tier that takes blocks too slowly gets no more for a while."""
        if transfer.target > transfer.source:
            self._blocks.totals.demotions_late += 1
            self._blocks.distrust(transfer.target)
        else:
            self._blocks.totals.loads_late += 1
            self._blocks.note_late_read(transfer.source)

    def _blame(self, transfer: Transfer) -> None:
        """Draw the consequences of how it ended for the tiers and blocks involved."""
        reason, good, totals = transfer.reason, transfer.good, self._blocks.totals
        if reason is None or good is None or reason in (TransferEnd.DONE, TransferEnd.CANCELLED):
            return
        is_down = transfer.target > transfer.source
        totals.demotions_failed += is_down
        totals.loads_failed += not is_down
        if is_down:
            self._blocks.distrust(transfer.target)
        elif reason in _OF_THE_MEDIUM:
            self._blocks.distrust(transfer.source)
        if reason is TransferEnd.FAILED or good >= len(transfer.rows):
            return
        is_broken = reason is TransferEnd.SLOT_BROKEN
        totals.corrupt += reason is TransferEnd.CORRUPT
        totals.stale += reason in _STALE
        if not is_down:
            why = Miss.LOAD_FAILED if is_broken else _MISSES[reason]
            # Nobody has looked at the rest of the run, which is as likely to be cut off or overwritten. It has to be
            # computed with the bad block whatever it is, and is written anew only where it is not taken for there.
            rest = transfer.rows[good : good + 1 if is_broken else len(transfer.rows)]
            for row in rest:
                self._blocks.condemn(transfer.source, row, why, retire=is_broken)
        elif is_broken:
            self._blocks.pools[transfer.target].retire(transfer.target_slots[good])
