"""Bringing one chain's missing blocks up to where they are wanted (pure).

A wake plans `rows`, the longest prefix of its keys that is somewhere, and holds what it
needs for it. It lives from the admission of a turn until its grant, or as a hint.

    rows[0, num_ready)             VALID in HBM, protected by a pin on the last of them
    rows[num_ready, len(rows))     below, pinned there, or on their way; never extended, only cut
    reserve                        OPEN slots of HBM for what is still to be loaded and then computed

Slots are taken top-down: HBM first, then DRAM or ring slots, then IO tokens; so two wakes
never wait for each other. A row whose load failed or came late cuts the plan: the turn
computes from there, and does not try again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.events import Miss
from kvstore.rows import NO_ROW
from kvstore.transfers import RUN_BLOCKS, Purpose
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.residency import Residency
    from kvstore.store import Store
    from kvstore.tails import Tail
    from kvstore.types import BlockKey


def plan(blocks: Residency, keys: Sequence[BlockKey], may_load: bool) -> list[int]:
    """Rows of the longest prefix of `keys` that is VALID in HBM or, if `may_load`, can be brought there."""
    rows: list[int] = []
    find, is_valid = blocks.rows.find, blocks.hbm.is_valid
    for key in keys:
        row = find(key)
        if row == NO_ROW or not (is_valid(row) or (may_load and blocks.can_come(row))):
            break
        rows.append(row)
    return rows


def plan_worth_restoring(blocks: Residency, keys: Sequence[BlockKey], may_load: bool) -> tuple[list[int], Miss | None]:
    """As `plan`, cut where computing the rest takes less time than bringing it up; then, or if it could not be, why."""
    rows = plan(blocks, keys, may_load)
    if may_load and rows and not blocks.hbm.is_valid(rows[-1]) and blocks.cost.decides(blocks.rows.now):
        present = sum(map(blocks.hbm.is_present, rows))
        sources = [blocks.source_of(row) or Tier.DRAM for row in rows[present:]]
        worth = blocks.cost.num_worth_restoring(sources, blocks.rows.now)
        if worth < len(sources):
            return rows[: present + worth], Miss.RECOMPUTE_CHEAPER
    return rows, why_unread(blocks, keys, rows)


def why_unread(blocks: Residency, keys: Sequence[BlockKey], rows: Sequence[int]) -> Miss | None:
    """Why `rows`, planned of `keys`, end where they do: was the next block found bad, or is its tier not to be read?"""
    if len(rows) == len(keys):
        return None
    if (blame := blocks.blames.of(keys[len(rows)])) is not None:
        return blame
    row = blocks.rows.find(keys[len(rows)])
    return Miss.LOAD_FAILED if row != NO_ROW and blocks.is_unreadable(row) else None


@dataclass(slots=True, eq=False)
class Wake:
    """See the module. `num_slots` are wanted in HBM in all, for loads and for computing; 0 when `target` is DRAM."""

    store: Store
    rows: list[int]
    num_slots: int
    deadline: float
    target: Tier = Tier.HBM
    tail: Tail | None = None
    num_ready: int = 0
    tip: int = NO_ROW
    reserve: list[int] = field(default_factory=list)
    miss: Miss | None = None
    has_failed: bool = False  # a load of its own failed or came late
    _pins: list[tuple[Tier, int]] = field(default_factory=list)
    _tail_slots: int = 0
    _num_present: int = 0  # of `rows`, VALID or on their way in HBM: a prefix, since HBM is closed under prefixes
    _faults_seen: int = 0

    def begin(self) -> None:
        """Protect what is planned where it is: the last row of the plan in each lower tier, its ancestors with it."""
        for pool in self.store.blocks.pools[1:]:
            for row in reversed(self.rows):
                if pool.is_valid(row):
                    pool.pin(row)
                    self._pins.append((pool.tier, row))
                    break
        self.advance()

    def release_tail(self) -> Tail | None:
        """The tail, away again, for a turn that has to wait after all."""
        tail, self.tail = self.tail, None
        if tail is not None and self._tail_slots:
            self.store.tails.recall(tail)
        return tail

    def end(self) -> None:
        """Let go of everything; loads under way end on their own."""
        self.store.blocks.hbm.close(self.reserve)
        self.reserve = []
        if self.tail is not None:
            self.store.tails.forget(self.tail)
            self.tail = None
        self._unpin_below()
        self._move_tip(NO_ROW)

    @property
    def lacking(self) -> int:
        """HBM slots still to be had; negative when others have brought some of its blocks."""
        return self.num_slots - self._count_present() - self._tail_slots - len(self.reserve)

    @property
    def is_ready(self) -> bool:
        """Is every planned block where it is wanted, and every slot there?"""
        if self.target is Tier.DRAM:
            dram = self.store.blocks.pools[Tier.DRAM]
            return all(dram.is_valid(row) or self.store.blocks.hbm.is_valid(row) for row in self.rows)
        return self.num_ready == len(self.rows) and self.lacking <= 0 and (self.tail is None or self.tail.is_back)

    @property
    def is_waiting(self) -> bool:
        """Is anything it planned still to come?"""
        return self.num_ready < len(self.rows) or (self.tail is not None and not self.tail.is_back)

    def advance(self) -> None:
        """Take note of what has arrived and of what will not."""
        rows, is_valid = self.rows, self.store.blocks.hbm.is_valid
        ready = self.num_ready
        while ready < len(rows) and is_valid(rows[ready]):
            ready += 1
        if ready != self.num_ready:
            self.num_ready = ready
            self._move_tip(rows[ready - 1])
        if self._faults_seen != self.store.blocks.num_faults:
            self._faults_seen = self.store.blocks.num_faults
            self._cut_at_fault()

    def _cut_at_fault(self) -> None:
        self._num_present = self.num_ready
        for index in range(self.num_ready, len(self.rows)):
            row = self.rows[index]
            if row in self.store.blocks.misses:
                self.miss, self.has_failed = self.store.blocks.misses[row], True
            elif self.store.blocks.can_come(row):
                continue
            elif self.store.blocks.is_unreadable(row):
                self.miss = self.store.blocks.blames.of(self.store.blocks.rows.key(row)) or Miss.LOAD_FAILED
            self.cut(index)
            break
        if self.tail is not None and self.tail.is_lost:
            self._lose_tail()

    def _count_present(self) -> int:
        rows, is_present = self.rows, self.store.blocks.hbm.is_present
        count = max(self._num_present, self.num_ready)
        while count < len(rows) and is_present(rows[count]):
            count += 1
        self._num_present = count
        return count

    def cut(self, index: int) -> None:
        """Wait for nothing from `rows[index]` on."""
        del self.rows[index:]
        self._num_present = min(self._num_present, index)
        if self.tail is not None:
            self._lose_tail()

    def give_up(self) -> None:
        """Its deadline has passed: wait for nothing more."""
        self.cut(self.num_ready)
        self.miss, self.has_failed = Miss.LOAD_TIMEOUT, True

    def take(self, slots: list[int]) -> None:
        """OPEN slots of HBM for this wake."""
        self.reserve += slots

    def give_back_surplus(self) -> None:
        """Free what others have made superfluous."""
        surplus = -self.lacking
        if surplus > 0:
            self.store.blocks.hbm.close(self.reserve[-surplus:])
            del self.reserve[-surplus:]

    def start(self) -> None:
        """Start every load that slots and IO tokens allow, in chain order."""
        gap = False  # beyond a block that is not on its way to HBM nothing can be loaded there, only lifted to DRAM
        index = self._count_present()
        while index < len(self.rows) and not (gap and not self._can_lift()):
            source, run = self._run_at(index)
            index += len(run)
            if source is None or (source is Tier.NVME and self._lift(run)):
                gap = True
            elif not gap:
                gap = self._load(run, source) < len(run)
        self._bring_tail_back()

    def _load(self, run: list[int], source: Tier) -> int:
        """Start to load as much of `run` as slots and IO tokens allow; how many blocks."""
        traffic = self.store.traffic
        if self.target is Tier.DRAM or not traffic.has_io_token(source, Tier.HBM):
            return 0
        count = min(len(run), len(self.reserve), traffic.num_ring_slots(source, Tier.HBM))
        if count:
            slots = [self.reserve.pop() for _ in range(count)]
            traffic.begin(Purpose.LOAD, source, Tier.HBM, run[:count], slots, self.deadline)
        return count

    def _run_at(self, index: int) -> tuple[Tier | None, list[int]]:
        """Rows from `rows[index]` on that are to be read from one tier; None: that are on their way to DRAM."""
        source = self._source_of(self.rows[index])
        end = index + 1
        while end < min(len(self.rows), index + RUN_BLOCKS) and self._source_of(self.rows[end]) is source:
            end += 1
        return source, self.rows[index:end]

    def _source_of(self, row: int) -> Tier | None:
        blocks = self.store.blocks
        source = blocks.source_of(row)
        return None if source is Tier.NVME and blocks.pools[Tier.DRAM].is_filling(row) else source

    def _can_lift(self) -> bool:
        blocks = self.store.blocks
        if len(blocks.pools) <= Tier.NVME:
            return False
        return blocks.pools[Tier.DRAM].num_free > 0 and self.store.traffic.has_io_token(Tier.NVME, Tier.DRAM)

    def _lift(self, run: list[int]) -> bool:
        """Start to bring what it can of `run` from NVMe into free slots of DRAM."""
        dram = self.store.blocks.pools[Tier.DRAM]
        if not self._can_lift() or any(map(dram.is_present, run)):
            return False  # no room, or it is there and not to be used
        run = run[: dram.num_free]
        self.store.traffic.begin(Purpose.LOAD, Tier.NVME, Tier.DRAM, run, dram.open(len(run)), self.deadline)
        return True

    def _bring_tail_back(self) -> None:
        tail = self.tail
        if tail is None or self._tail_slots or len(self.reserve) < tail.num_blocks or self.lacking > 0:
            return
        slots = [self.reserve.pop() for _ in range(tail.num_blocks)]
        self._tail_slots = len(slots)
        self.store.tails.bring_back(tail, slots, self.deadline)

    def _lose_tail(self) -> None:
        assert self.tail is not None
        self.store.tails.forget(self.tail)
        self.tail = None
        self._tail_slots = 0

    def _move_tip(self, row: int) -> None:
        """Pin the new tip before the old one is let go, so that the chain is never unprotected."""
        if row != NO_ROW:
            self.store.blocks.hbm.pin(row)
        if self.tip != NO_ROW:
            self.store.blocks.unpin(Tier.HBM, self.tip)
        self.tip = row

    def _unpin_below(self) -> None:
        for tier, row in self._pins:
            self.store.blocks.unpin(tier, row)
        self._pins.clear()

    def hand_over(self) -> tuple[int, list[int], list[int]]:
        """Its pinned tip, the slots of its whole prefix and tail, and its reserve, for the turn that is granted now."""
        slots = [self.store.blocks.hbm.slot(row) for row in self.rows]
        if self.tail is not None:
            slots += self.store.tails.take(self.tail)
            self.tail = None
        tip, reserve = self.tip, self.reserve
        self.tip, self.reserve = NO_ROW, []
        self._unpin_below()
        return tip, slots, reserve

    def pins(self) -> list[tuple[Tier, int]]:
        """For check()."""
        return [*self._pins, *([(Tier.HBM, self.tip)] if self.tip != NO_ROW else [])]
