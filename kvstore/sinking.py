"""What is copied to NVMe ahead of need, and when (pure).

    every turn    what a turn has added to its branch, when the branch is recorded
    on idle       what a branch has added, once nobody has used it for `idle_to_nvme_seconds`
    on pressure   nothing here: DRAM's watermark writes what it needs the room of
    auto          every turn, until the last day's bytes are as many as the drive is rated for; then on pressure
    drain         everything that should be there, until its deadline

Whatever the policy, a chain can be asked for (`SleepWanted`). Only what NVMe does not have is
written, parents first, in runs; a few at a time, since loads and the engine need the same
memory and the same disk. A copy that failed is tried again when the tier takes something again;
one for which NVMe has no room, because all that is there is warmer, is not.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.events import WritePolicy, WritePolicyChanged
from kvstore.rows import NO_ROW
from kvstore.transfers import RUN_BLOCKS, Purpose
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.config import PlannerConfig
    from kvstore.events import Action
    from kvstore.store import Store
    from kvstore.types import BlockKey

MOST_RUNS = 2
"""At once, late ones among them: a disk that hangs pins no more than these. A drain takes all that IO tokens allow."""


class Sinking:
    """See the module."""

    def __init__(self, store: Store, config: PlannerConfig, emit: Callable[[Action], None]) -> None:
        self._store = store
        self._config = config
        self._emit = emit
        self._idle: OrderedDict[BlockKey, float] = OrderedDict()  # tips by when they are due, which is their order
        self._drain_until: float | None = None
        self._is_over = False

    @property
    def policy(self) -> WritePolicy:
        """What decides now."""
        if self._config.nvme_write_policy is not WritePolicy.AUTO:
            return self._config.nvme_write_policy
        return WritePolicy.ON_PRESSURE if self._is_over else WritePolicy.EVERY_TURN

    @property
    def num_sinking(self) -> int:
        """Blocks that are to be copied, and those under way."""
        under_way = self._store.traffic.transfers.with_purpose(Purpose.SINK)
        return len(self._store.blocks.dirty.due) + sum(len(transfer.rows) for transfer in under_way)

    def is_due(self, row: int) -> bool:
        """Is `row` to be copied, or on its way?"""
        blocks = self._store.blocks
        return row in blocks.dirty.due or blocks.pools[Tier.NVME].is_filling(row)

    # --- what asks for it -------------------------------------------------------------

    def branch_moved(self, tip: BlockKey, old_tip: BlockKey | None) -> None:
        """A branch that may lie on NVMe ends at `tip` now."""
        if not self._store.blocks.has_tier(Tier.NVME):
            return
        if old_tip is not None:
            self.forget(old_tip)
        policy = self.policy
        if policy is WritePolicy.ON_PRESSURE:
            return
        if policy is WritePolicy.EVERY_TURN:
            self.ask_for(self._store.blocks.tips.row(tip))
        self._wait_for_idle(tip)

    def ask_for(self, row: int) -> None:
        """Copy what is dirty of the chain that ends in `row`; its blocks are as recent as it is."""
        blocks = self._store.blocks
        dirty, last, parents = blocks.dirty.rows, blocks.rows.last, blocks.rows.parent
        if not dirty:
            return
        chain, moment = [], last[row]
        while row != NO_ROW:
            if row in dirty:
                last[row] = max(last[row], moment)
                chain.append(row)
            row = parents[row]
        blocks.dirty.make_due(reversed(chain))

    def forget(self, tip: BlockKey) -> None:
        """A branch does not end at `tip` any more."""
        self._idle.pop(tip, None)

    def drain(self, deadline: float) -> None:
        """Copy everything, and what is added until then."""
        if not self._store.blocks.has_tier(Tier.NVME):
            return  # `run` would never end it, and its moment would be due again and again
        self._drain_until = deadline
        self._store.blocks.dirty.all_due = True
        self._store.blocks.dirty.make_due(list(self._store.blocks.dirty.rows))

    # --- doing it ---------------------------------------------------------------------

    def run(self) -> None:
        """Start what can be started."""
        blocks = self._store.blocks
        if not blocks.has_tier(Tier.NVME):
            return
        self._watch_budget()
        while self._idle and next(iter(self._idle.values())) <= blocks.rows.now:
            self._fell_idle(self._idle.popitem(last=False)[0])
        if self._drain_until is not None and self._drain_until <= blocks.rows.now:
            self._drain_until = None
            blocks.dirty.all_due = False
            blocks.dirty.due.clear()
        while blocks.dirty.due and self._may_start():
            if not self._start(next(iter(blocks.dirty.due))):
                return

    def next_moment(self) -> float | None:
        """When there will be something to do that no event tells of."""
        blocks = self._store.blocks
        moments = [next(iter(self._idle.values()), None), self._drain_until]
        if blocks.dirty.due and blocks.health.retry_at(Tier.NVME) > blocks.rows.now:
            moments.append(blocks.health.retry_at(Tier.NVME))
        return min((moment for moment in moments if moment is not None), default=None)

    def _watch_budget(self) -> None:
        if self._config.nvme_write_policy is not WritePolicy.AUTO:
            return
        budget, now = self._store.blocks.budget, self._store.blocks.rows.now
        if budget.is_over(now) is not self._is_over:
            self._is_over = not self._is_over
            self._emit(WritePolicyChanged(self.policy, budget.last_day(now)))

    def _fell_idle(self, tip: BlockKey) -> None:
        """Nobody has recorded the branch at `tip` for a while; a turn may be at it."""
        blocks = self._store.blocks
        row = blocks.tips.row(tip)
        if row == NO_ROW or self.policy is WritePolicy.ON_PRESSURE:
            return
        idle_at = blocks.rows.last[row] + self._config.idle_to_nvme_seconds
        if blocks.hbm.is_held(row) or idle_at > blocks.rows.now:
            self._wait_for_idle(tip)
        else:
            self.ask_for(row)

    def _wait_for_idle(self, tip: BlockKey) -> None:
        self._idle.pop(tip, None)
        self._idle[tip] = self._store.blocks.rows.now + self._config.idle_to_nvme_seconds

    def _may_start(self) -> bool:
        blocks, transfers = self._store.blocks, self._store.traffic.transfers
        if not blocks.takes(Tier.NVME):
            return False
        return self._drain_until is not None or transfers.num_of(Purpose.SINK) < MOST_RUNS

    def _start(self, row: int) -> bool:
        """Start to copy a run that begins with the first block above `row` that is due; False if it has to wait."""
        blocks, traffic = self._store.blocks, self._store.traffic
        nvme, due = blocks.pools[Tier.NVME], blocks.dirty.due
        source = self._source_of(row)
        if source is None:
            del due[row]  # it is on its way already, or cannot be read
            return True
        source, run = self._run_from(row, source)
        if not traffic.has_io_token(source, Tier.NVME):
            return False
        count = min(len(run), traffic.num_ring_slots(source, Tier.NVME))
        if not count:
            return False
        tenant = blocks.rows.tenant[run[0]]
        slots = self._store.room.slots_in(Tier.NVME, count, nvme.frontier.worth(run[0]), tenant)
        if not slots and nvme.num_valid < nvme.capacity:
            return False  # others are being written to, or erased
        for done in run[: len(slots)] or run:
            del due[done]
        if slots:
            traffic.begin(Purpose.SINK, source, Tier.NVME, run[: len(slots)], slots)
        return True

    def _run_from(self, row: int, source: Tier) -> tuple[Tier, list[int]]:
        """Blocks that are due and continue each other, `row` or one of its ancestors first, all read from one tier."""
        due, parents = self._store.blocks.dirty.due, self._store.blocks.rows.parent
        path = [row]
        while (parent := parents[path[-1]]) in due and (above := self._source_of(parent)) is not None:
            path.append(parent)
            source = above
        path = path[: -RUN_BLOCKS - 1 : -1]
        if path[-1] == row:
            path += self._following(row, islice(due, RUN_BLOCKS + 1))
        run = []
        for each in path[:RUN_BLOCKS]:
            if self._source_of(each) is not source:
                break
            run.append(each)
        return source, run

    def _following(self, row: int, candidates: Iterable[int]) -> list[int]:
        """Those of `candidates` that continue `row`, each the one before it."""
        parents, found = self._store.blocks.rows.parent, [row]
        for each in candidates:
            if parents[each] == found[-1]:
                found.append(each)
        return found[1:]

    def _source_of(self, row: int) -> Tier | None:
        """Where to read `row` for a copy to NVMe; None if there is none, or one is being made."""
        blocks = self._store.blocks
        if blocks.pools[Tier.NVME].is_present(row):
            return None
        if blocks.can_read(Tier.DRAM, row):
            return Tier.DRAM
        return Tier.HBM if blocks.hbm.is_valid(row) else None
