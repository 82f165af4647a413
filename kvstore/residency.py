"""Where every block is and on its way to: pools, rows and transfers kept consistent (pure).

It knows blocks and tiers and no turns: `Planner` and `Wake` say what is wanted, this says
what that takes. Every slot is reserved before bytes move and every source pinned until its
transfer has ended. Whatever goes wrong with a transfer, its target becomes absent and its
source stays; a block that did not verify is condemned: nobody reads it again, and it is
dropped as soon as nothing pins it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvstore.cleaner import Cleaner
from kvstore.events import Action, CancelTransfer, Miss, StartTransfer, TierHealth, TransferEnd
from kvstore.policy import Kind
from kvstore.pool import Pool
from kvstore.rows import NO_ROW, Rows
from kvstore.snapshot import Totals
from kvstore.tails import Tail
from kvstore.transfers import RUN_BLOCKS, Purpose, Transfer, Transfers
from kvstore.types import Tier, TransferId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.config import PlannerConfig


class Leaving(Enum):
    """How a row can leave HBM."""

    NOW = "now"  # it has a copy below, or nothing below takes it
    STARTED = "started"  # it is being copied down
    BUSY = "busy"  # it could be copied down once a transfer under way has ended


class Residency:
    """See the module. `emit` takes the actions; `misses` are the rows whose load failed since it was cleared."""

    def __init__(self, config: PlannerConfig, emit: Callable[[Action], None]) -> None:
        capacities = (config.hbm_slots, config.dram_slots, config.nvme_slots)
        tiers = 3 if config.nvme_slots else 2 if config.dram_slots else 1
        self.config = config
        self.rows = Rows(tiers)
        self.pools = tuple(Pool(tier, capacities[tier], self.rows) for tier in Tier if tier < tiers)
        self.hbm = self.pools[Tier.HBM]
        self.transfers = Transfers()
        self.cleaner = Cleaner()
        self.totals = Totals()
        self.misses: dict[int, Miss] = {}
        self.coming = 0  # slots of HBM that demotions under way will free
        self.tails: set[Tail] = set()
        self._emit = emit
        self._health = [TierHealth.OK] * tiers
        self._retry_at = [0.0] * tiers
        self._condemned: dict[tuple[Tier, int], bool] = {}  # True: retire the slot as well
        self._ring_up = list(range(config.ring_slots))
        self._ring_down = list(range(config.ring_slots, 2 * config.ring_slots))
        self._next_transfer = 0

    # --- asking -----------------------------------------------------------------------

    def source_of(self, row: int) -> Tier | None:
        """The nearest tier below HBM that `row` can be read from."""
        for pool in self.pools[1:]:
            if pool.is_valid(row) and self._is_readable(pool.tier, row):
                return pool.tier
        return None

    def is_rising(self, row: int) -> bool:
        """Is `row` on its way from a lower tier into DRAM?"""
        return len(self.pools) > 1 and self.pools[Tier.DRAM].is_filling(row) and self.source_of(row) is Tier.NVME

    def has_copy_below(self, tier: Tier, row: int) -> bool:
        return any(pool.is_valid(row) and self._is_readable(pool.tier, row) for pool in self.pools[tier + 1 :])

    def is_copying_hbm(self) -> bool:
        """Does any transfer, even a late one, still use slots of HBM?"""
        return any(Tier.HBM in (t.source, t.target) for t in self.transfers)

    def takes(self, tier: Tier) -> bool:
        """Does it make sense to copy anything down into `tier`?"""
        if tier >= len(self.pools) or not self.pools[tier].capacity:
            return False
        return self._health[tier] is TierHealth.OK and self._retry_at[tier] <= self.rows.now

    def has_io_token(self, source: Tier, target: Tier) -> bool:
        return self.transfers.num_between(source, target) < self.config.max_transfers

    def _is_readable(self, tier: Tier, row: int) -> bool:
        return self._health[tier] is not TierHealth.OFF and (tier, row) not in self._condemned

    def set_health(self, tier: Tier, health: TierHealth) -> None:
        self._health[tier] = health
        if health is TierHealth.OK:
            self._retry_at[tier] = 0.0

    # --- rows -------------------------------------------------------------------------

    def publish(self, row: int, slot: int) -> None:
        """The OPEN HBM `slot` holds the block of `row`, which is not VALID in HBM."""
        if self.hbm.is_filling(row):
            self.hbm.overtake(row, slot)
            self.totals.overtaken += 1
            self.land()
        else:
            self.hbm.publish(row, slot)
        self.rows.origin[row] = Tier.HBM
        self._refresh_below(row)
        self.totals.published += 1

    def drop(self, tier: Tier, row: int) -> None:
        """Free the VALID copy of `row` in `tier`."""
        if tier is Tier.HBM:
            self.cleaner.leave(row, self.rows.parent[row])
        pool = self.pools[tier]
        slot = pool.slot(row)
        pool.drop(row)
        if self._condemned.pop((tier, row), False):
            pool.retire(slot)
        self.rows.forget_unused(row)

    def reopen(self, row: int) -> int:
        """Make the HBM copy of `row` private again to the turn that attends to it; its slot."""
        self.cleaner.leave(row, self.rows.parent[row])
        slot = self.hbm.reopen(row)
        self.rows.forget_unused(row)
        return slot

    def unpin(self, tier: Tier, row: int) -> None:
        self.pools[tier].unpin(row)
        self.rows.forget_unused(row)

    def flush(self) -> None:
        """Drop every copy that nothing needs."""
        for pool in self.pools:
            self.totals.flushed += pool.evictable
            for _ in range(pool.evictable):
                self.drop(pool.tier, pool.frontier.coldest())

    def refresh(self, row: int) -> None:
        """`row` became less worth keeping."""
        for pool in self.pools:
            pool.refresh(row)

    def _refresh_below(self, row: int) -> None:
        """What is VALID in HBM is a duplicate below, and goes first there."""
        for pool in self.pools[1:]:
            pool.refresh(row)

    # --- making room ------------------------------------------------------------------

    def obtain(self, count: int) -> int:
        """Free slots of HBM there are now, at most `count`; for the rest the coldest blocks are on their way down."""
        hbm = self.hbm
        while hbm.num_free + self.coming < count:
            row = hbm.frontier.coldest()
            if row == NO_ROW:
                break
            leaving = self.demote(row, count - hbm.num_free - self.coming)
            if leaving is Leaving.BUSY:
                break
            if leaving is Leaving.NOW:
                self._make_room_with(row)
        return min(count, hbm.num_free)

    def demote(self, row: int, most: int) -> Leaving:
        """Start to copy down the run that ends in `row`, at most `most` blocks of it, or say that it can go now."""
        if self.rows.kind[row] <= Kind.FINAL or self.has_copy_below(Tier.HBM, row):
            return Leaving.NOW
        run = self._dirty_run(row, min(most, RUN_BLOCKS))
        for target in (Tier.DRAM, Tier.NVME):
            if not self.takes(target):
                continue
            if not self.has_io_token(Tier.HBM, target):
                if any(t.source is Tier.HBM and t.target is target for t in self.transfers.waited_for()):
                    return Leaving.BUSY
                continue  # every worker hangs: progress never waits for a lower tier
            slots, ring = self._room_below(target, len(run), self.hbm.frontier.worth(row))
            if slots:
                self._begin(Purpose.DEMOTE, Tier.HBM, target, run[-len(slots) :], slots, ring)
                self.coming += len(slots)
                return Leaving.STARTED
        return Leaving.NOW

    def clean(self, tip: int, may_evict: bool) -> bool:
        """Start to copy down the topmost blocks of the chain ending in `tip` that have no copy below; False if none."""
        run = self._rows_without_copy(tip)
        if not run:
            return False
        dram = self.pools[Tier.DRAM]
        room = min(len(run), RUN_BLOCKS)
        worth = self.hbm.frontier.worth(tip) if may_evict else (Kind.DUPLICATE, 0.0)
        slots = self._slots_in(Tier.DRAM, room, worth) if may_evict else dram.open(min(room, dram.num_free))
        if slots:
            self._begin(Purpose.CLEAN, Tier.HBM, Tier.DRAM, run[: len(slots)], slots, [])
        return bool(slots)

    def relieve(self, tier: Tier, count: int) -> None:
        """Drop, or start to copy down, the coldest `count` blocks of a tier between two others."""
        pool, below = self.pools[tier], Tier(tier + 1)
        for _ in range(count):
            row = pool.frontier.coldest()
            if row == NO_ROW:
                return
            if pool.frontier.worth(row)[0] <= Kind.FINAL or self.has_copy_below(tier, row) or not self.takes(below):
                self.drop(tier, row)
                continue
            if not self.has_io_token(tier, below):
                return
            slots = self._slots_in(below, 1, pool.frontier.worth(row))
            if slots:
                self._begin(Purpose.DEMOTE, tier, below, [row], slots, [])
            else:
                self.drop(tier, row)

    def _make_room_with(self, row: int) -> None:
        if self.has_copy_below(Tier.HBM, row):
            self.totals.released += 1
        else:
            self.totals.evicted += 1
        self.drop(Tier.HBM, row)

    def _dirty_run(self, row: int, most: int) -> list[int]:
        """`row` and those of its ancestors that can only leave after it, in chain order."""
        hbm, parents = self.hbm, self.rows.parent
        run = [row]
        parent = parents[row]
        while len(run) < most and parent != NO_ROW:
            if hbm.num_kids(parent) > 1 or hbm.is_held(parent) or self._is_below(parent):
                break
            run.append(parent)
            parent = parents[parent]
        return run[::-1]

    def lacks_copy(self, tip: int) -> bool:
        """Has the chain that ends in `tip` blocks, at its end, that are nowhere below nor on their way there?"""
        return not self._is_below(tip)

    def _rows_without_copy(self, tip: int) -> list[int]:
        """The rows above and with `tip`, up to the first that is below already, in chain order."""
        run = []
        while tip != NO_ROW and not self._is_below(tip):
            run.append(tip)
            tip = self.rows.parent[tip]
        return run[::-1]

    def _is_below(self, row: int) -> bool:
        return any(pool.is_present(row) for pool in self.pools[1:])

    def _room_below(self, tier: Tier, count: int, worth: tuple[int, float]) -> tuple[list[int], list[int]]:
        """OPEN slots in `tier` for blocks of HBM worth `worth`, and the ring slots they pass through."""
        if tier is Tier.DRAM:
            return self._slots_in(tier, count, worth), []
        slots = self._slots_in(tier, min(count, len(self._ring_down)), worth)
        return slots, [self._ring_down.pop() for _ in slots]

    def _slots_in(self, tier: Tier, count: int, worth: tuple[int, float]) -> list[int]:
        """At most `count` OPEN slots of `tier`, dropping what is worth less and needs no IO to go."""
        pool = self.pools[tier]
        while pool.num_free < count:
            row = pool.frontier.coldest()
            if row == NO_ROW or pool.frontier.worth(row) >= worth:
                break
            expendable = pool.frontier.worth(row)[0] <= Kind.FINAL or self.has_copy_below(tier, row)
            if not expendable and tier < len(self.pools) - 1 and self.takes(Tier(tier + 1)):
                break  # it has to be written first, which `relieve` does ahead of need
            self.totals.evicted += not expendable
            self.drop(tier, row)
        return pool.open(min(count, pool.num_free))

    # --- loads ------------------------------------------------------------------------

    def load(self, run: Sequence[int], source: Tier, slots: list[int], deadline: float) -> None:
        """Start to bring `run`, VALID in `source`, into OPEN `slots` of HBM; the block before it is present there."""
        ring = [self._ring_up.pop() for _ in slots] if source is Tier.NVME else []
        self._begin(Purpose.LOAD, source, Tier.HBM, run, slots, ring, deadline)

    def lift(self, run: Sequence[int], deadline: float) -> int:
        """Start to bring `run` from NVMe into free slots of DRAM; how many of its blocks."""
        dram = self.pools[Tier.DRAM]
        count = min(len(run), dram.num_free)
        if count:
            self._begin(Purpose.LOAD, Tier.NVME, Tier.DRAM, run[:count], dram.open(count), [], deadline)
        return count

    @property
    def num_ring_up(self) -> int:
        return len(self._ring_up)

    def _begin(
        self,
        purpose: Purpose,
        source: Tier,
        target: Tier,
        run: Sequence[int],
        slots: list[int],
        ring: list[int],
        deadline: float | None = None,
    ) -> None:
        sources, targets = self.pools[source], self.pools[target]
        for row, slot in zip(run, slots, strict=True):
            targets.begin_fill(row, slot)
        sources.pin(run[-1])
        targets.pin(run[-1])
        transfer = Transfer(
            id=TransferId(self._next_transfer),
            purpose=purpose,
            source=source,
            target=target,
            rows=list(run),
            source_slots=[sources.slot(row) for row in run],
            target_slots=slots,
            ring_slots=ring,
            deadline=self.rows.now + self.config.demote_deadline_seconds if deadline is None else deadline,
        )
        self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        self._next_transfer += 1
        self.transfers.add(transfer)
        keys = tuple(self.rows.key(row) for row in transfer.rows)
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
            )
        )

    # --- ends of transfers ------------------------------------------------------------

    def cancel(self, transfer: Transfer) -> None:
        """Nobody waits for it; it still ends, well or not."""
        if not transfer.cancelled and not transfer.has_ended:
            transfer.cancelled = True
            self._emit(CancelTransfer(transfer.id))

    def cancel_loads_except(self, wanted: set[int]) -> None:
        """Cancel loads that bring none of the rows `wanted`."""
        for transfer in self.transfers.with_purpose(Purpose.LOAD):
            if wanted.isdisjoint(transfer.rows):
                self.cancel(transfer)

    def expire(self) -> None:
        """Give up waiting for transfers that are past their deadline."""
        for transfer in self.transfers.overdue(self.rows.now):
            if not transfer.late:  # its parent's lateness may have taken it along
                self._count_late(transfer)
                self._give_up(transfer, Miss.LOAD_TIMEOUT)

    def finish(self, transfer_id: TransferId, good: int, reason: TransferEnd) -> None:
        """The transfer has ended with the first `good` blocks of its run sound."""
        transfer = self.transfers[transfer_id]
        transfer.good, transfer.reason = good, reason
        up = transfer.source is Tier.NVME
        (self._ring_up if up else self._ring_down).extend(transfer.ring_slots)
        if transfer.owner is not None:
            self._finish_tail(transfer, transfer.owner)
            return
        self.pools[transfer.source].unpin(transfer.rows[-1])
        if transfer.late:
            self._leave_quarantine(transfer)
        else:
            self.land()
        self._blame(transfer)
        self.rows.forget_unused(transfer.rows[-1])

    def sweep(self) -> None:
        """Drop condemned copies that nothing pins any more."""
        for tier, row in list(self._condemned):
            if not self.pools[tier].is_held(row):
                self.drop(tier, row)

    def land(self) -> None:
        """Publish what transfers have brought, each run once the block before it is VALID."""
        while self.transfers.has_landing():
            ready = [t for t in self.transfers if t.has_ended and not t.late and not self._waits_for_parent(t)]
            if not ready:
                return
            self._land(ready[0])

    def _waits_for_parent(self, transfer: Transfer) -> bool:
        parent = self.rows.parent[transfer.rows[0]]
        return transfer.target is Tier.HBM and parent != NO_ROW and self.hbm.is_filling(parent)

    def _land(self, transfer: Transfer) -> None:
        assert transfer.good is not None
        self.transfers.remove(transfer)
        pool = self.pools[transfer.target]
        unsound = []
        for index, (row, slot) in enumerate(zip(transfer.rows, transfer.target_slots, strict=True)):
            if pool.slot(row) != slot:
                pool.leave_quarantine(slot)  # a turn's own fill has overtaken it
            elif index < transfer.good:
                pool.finish_fill(row)
                self._arrived(transfer, row)
            else:
                unsound.append(row)
        self._give_up_below(unsound, Miss.LOAD_FAILED)
        pool.unpin(transfer.rows[-1])
        for row in reversed(unsound):
            pool.abandon_fill(row, ended=True)
            self._note_miss(transfer, row, Miss.LOAD_FAILED)
        if transfer.purpose is Purpose.DEMOTE:
            self._leave_after_copy(transfer)
        for row in reversed(unsound):
            self.rows.forget_unused(row)

    def _arrived(self, transfer: Transfer, row: int) -> None:
        totals = self.totals
        if transfer.target is Tier.HBM:
            self._refresh_below(row)
        if transfer.purpose is Purpose.LOAD:
            self.rows.origin[row] = max(self.rows.origin[row], transfer.source)
            totals.loaded += 1
        elif transfer.purpose is Purpose.DEMOTE:
            totals.demoted += 1
        else:
            totals.cleaned += 1

    def _leave_after_copy(self, transfer: Transfer) -> None:
        """A demotion has ended: its sources leave, tail first, as far as they have a copy and nobody wants them."""
        if transfer.source is Tier.HBM:
            self.coming -= len(transfer.rows)
        pool = self.pools[transfer.source]
        for row in reversed(transfer.rows):
            if not pool.may_leave(row) or not self.has_copy_below(transfer.source, row):
                return
            self.totals.released += transfer.source is Tier.HBM
            self.drop(transfer.source, row)

    def _give_up(self, transfer: Transfer, miss: Miss) -> None:
        """Its targets are absent from now on; so are those of later runs, which would lie below a gap in HBM."""
        ended = transfer.has_ended
        transfer.late = True
        if transfer.owner is not None:
            self._give_up_tail(transfer, transfer.owner)
            return
        pool = self.pools[transfer.target]
        filling = [r for r, s in zip(transfer.rows, transfer.target_slots, strict=True) if pool.slot(r) == s]
        self._give_up_below(filling, miss)
        pool.unpin(transfer.rows[-1])
        for row in reversed(filling):
            pool.abandon_fill(row, ended)
            self._note_miss(transfer, row, miss)
        if transfer.purpose is Purpose.DEMOTE and transfer.source is Tier.HBM:
            self.coming -= len(transfer.rows)
        if ended:
            self._leave_quarantine_of_overtaken(transfer, filling)
            self.transfers.remove(transfer)
        else:
            self.cancel(transfer)
        for row in reversed(filling):
            self.rows.forget_unused(row)

    def _give_up_below(self, rows: list[int], miss: Miss) -> None:
        """Runs into HBM that continue one of `rows`, whose own load has failed."""
        for other in self.transfers:
            if other.target is Tier.HBM and other.rows and not other.late:
                parent = self.rows.parent[other.rows[0]]
                if parent != NO_ROW and parent in rows and self.hbm.is_filling(parent):
                    self._give_up(other, miss)

    def _leave_quarantine(self, transfer: Transfer) -> None:
        self.transfers.remove(transfer)
        for slot in transfer.target_slots:
            self.pools[transfer.target].leave_quarantine(slot)

    def _leave_quarantine_of_overtaken(self, transfer: Transfer, filling: list[int]) -> None:
        for row, slot in zip(transfer.rows, transfer.target_slots, strict=True):
            if row not in filling:
                self.pools[transfer.target].leave_quarantine(slot)

    def _note_miss(self, transfer: Transfer, row: int, miss: Miss) -> None:
        if transfer.purpose is not Purpose.LOAD:
            return
        corrupt = transfer.reason is TransferEnd.CORRUPT
        self.misses[row] = Miss.CORRUPT if corrupt and miss is Miss.LOAD_FAILED else miss

    def _count_late(self, transfer: Transfer) -> None:
        if transfer.target > transfer.source:
            self.totals.demotions_late += 1
            self._retry_at[transfer.target] = self.rows.now + self.config.tier_backoff_seconds
        else:
            self.totals.loads_late += 1

    def _blame(self, transfer: Transfer) -> None:
        """Draw the consequences of how it ended for the tiers and blocks involved."""
        reason, good = transfer.reason, transfer.good
        if reason is TransferEnd.DONE or reason is TransferEnd.CANCELLED or good is None:
            return
        down = transfer.target > transfer.source
        if down:
            self.totals.demotions_failed += 1
            self._retry_at[transfer.target] = self.rows.now + self.config.tier_backoff_seconds
        else:
            self.totals.loads_failed += 1
        if good >= len(transfer.rows) or reason is TransferEnd.FAILED:
            return
        self.totals.corrupt += reason is TransferEnd.CORRUPT
        if not down:
            key = (transfer.source, transfer.rows[good])
            if self.pools[transfer.source].is_valid(transfer.rows[good]):
                self._condemned[key] = reason is TransferEnd.SLOT_BROKEN or self._condemned.get(key, False)
        elif reason is TransferEnd.SLOT_BROKEN:
            self.pools[transfer.target].retire(transfer.target_slots[good])

    # --- tails ------------------------------------------------------------------------

    def put_away(self, first_index: int, slots: list[int], tokens: int) -> Tail | None:
        """Copy a stopped turn's OPEN HBM slots to private DRAM slots; None, and they are free, if there is no room.

        The HBM slots are free once the copy has ended.
        """
        worth = (Kind.PINNED + 1, 0.0)  # more than any cached block: nothing else has a copy of this
        room = self._slots_in(Tier.DRAM, len(slots), worth) if self.takes(Tier.DRAM) else []
        if len(room) < len(slots):
            if room:
                self.pools[Tier.DRAM].close(room)
            self.hbm.close(slots)
            self.totals.tails_lost += 1
            return None
        tail = Tail(first_index, len(slots), tokens)
        self.tails.add(tail)
        self._move_tail(tail, Tier.HBM, slots, room, self.rows.now + self.config.demote_deadline_seconds)
        self.totals.tails_kept += 1
        return tail

    def bring_back(self, tail: Tail, slots: list[int], deadline: float) -> None:
        """Copy a tail that is away into OPEN HBM `slots`."""
        room = [tail.dram[index] for index in sorted(tail.dram)]
        self._move_tail(tail, Tier.DRAM, room, slots, deadline)

    def forget_tail(self, tail: Tail) -> None:
        """Free its slots, those in transfer once that has ended."""
        tail.is_lost = True
        self._settle_tail(tail)

    def _move_tail(self, tail: Tail, source: Tier, sources: list[int], targets: list[int], deadline: float) -> None:
        target = Tier.DRAM if source is Tier.HBM else Tier.HBM
        for start in range(0, len(sources), RUN_BLOCKS):
            run = slice(start, start + RUN_BLOCKS)
            self.pools[target].begin_private_fill(targets[run])
            tail.num_pending += 1
            self._send(
                Transfer(
                    id=TransferId(self._next_transfer),
                    purpose=Purpose.TAIL,
                    source=source,
                    target=target,
                    rows=[],
                    source_slots=sources[run],
                    target_slots=targets[run],
                    ring_slots=[],
                    deadline=deadline,
                    owner=tail,
                    indices=list(range(tail.first_index + start, tail.first_index + start + len(sources[run]))),
                )
            )

    def _finish_tail(self, transfer: Transfer, tail: Tail) -> None:
        self.transfers.remove(transfer)
        tail.num_pending -= 1
        targets = self.pools[transfer.target]
        if transfer.late:
            for slot in transfer.target_slots:
                targets.leave_quarantine(slot)
        else:
            targets.finish_private_fill(transfer.target_slots)
            arrived = tail.dram if transfer.target is Tier.DRAM else tail.hbm
            arrived.update(zip(transfer.indices, transfer.target_slots, strict=True))
        if transfer.source is Tier.HBM:
            self.hbm.close(transfer.source_slots)
        if transfer.good != len(transfer.source_slots):
            tail.is_lost = True
        self._settle_tail(tail)

    def _give_up_tail(self, transfer: Transfer, tail: Tail) -> None:
        self.pools[transfer.target].abandon_private_fill(transfer.target_slots)
        self.cancel(transfer)
        tail.is_lost = True
        self._settle_tail(tail)

    def _settle_tail(self, tail: Tail) -> None:
        """Free what is of no use any more; never the source of a transfer under way."""
        if tail.is_lost and tail.num_pending == 0:
            if tail in self.tails:
                self.totals.tails_lost += 1
            self.hbm.close(list(tail.hbm.values()))
            tail.hbm.clear()
        if (tail.is_lost or tail.is_back) and tail.num_pending == 0:
            if tail.dram:
                self.pools[Tier.DRAM].close(list(tail.dram.values()))
                tail.dram.clear()
            self.tails.discard(tail)
