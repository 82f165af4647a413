"""Bringing up what the first turns of the queue will need, before there is room to admit them (pure).

- It holds nothing: no pin, no slot but the targets of its loads. Blocks that are up are idle like
  any others, so whoever may be admitted finds as much room as without it.
- What those turns need is worth keeping for a while where it is, softly, as after a hint.
- Loads take slots of HBM that are free, or that hold an idle block with a copy below which nobody
  asked to keep; never those of another waiter's blocks, or two of them would load in turn for ever.
- From NVMe it lifts into free slots of DRAM what HBM has no room for.
- A turn whose load failed or came late is left alone from then on: it computes.

HBM is closed under prefixes and so is the block table; what of a chain is present is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.policy import Kind
from kvstore.rows import NO_ROW
from kvstore.transfers import RUN_BLOCKS
from kvstore.types import Tier
from kvstore.wakes import Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.config import PlannerConfig
    from kvstore.roster import Roster
    from kvstore.store import Store
    from kvstore.turns import Turn
    from kvstore.types import BlockKey


class LookAhead:
    """See the module."""

    def __init__(self, store: Store, roster: Roster, config: PlannerConfig) -> None:
        self._store = store
        self._blocks = store.blocks
        self._roster = roster
        self._config = config

    def run(self, *, may_take: bool) -> None:
        """Keep what the first waiters have; if HBM's slots are not wanted elsewhere (`may_take`), load more of it."""
        if len(self._blocks.pools) == 1 or not self._roster.queue:
            return
        turns = list(self._turns())
        for turn in turns:
            self._note_miss(turn)
            self._keep(turn)
        for turn in turns:
            if turn.may_load:
                before = len(self._store.traffic.transfers)
                if may_take:
                    self._load(turn)
                self._lift(turn)
                turn.woken_from_queue |= len(self._store.traffic.transfers) > before

    def rows(self) -> set[int]:
        """Rows that the first waiters will want."""
        find = self._blocks.rows.find
        return {find(key) for turn in self._turns() for key in turn.keys} - {NO_ROW}

    def _turns(self) -> Iterator[Turn]:
        return islice((turn for turn in self._roster.waiters() if turn.keys), self._config.look_ahead_turns)

    def _note_miss(self, turn: Turn) -> None:
        """Has a load for it just failed, or come late?"""
        misses = self._blocks.misses
        if misses and turn.woken_from_queue and turn.may_load:
            row = self._row(turn.keys, self._num_present(turn.keys))
            if row in misses:
                turn.may_load, turn.miss = False, misses[row]

    def _keep(self, turn: Turn) -> None:
        """The last block of its chain that is in HBM, and the last that is anywhere; the others leave after them."""
        rows = self._blocks.rows
        for count in {self._num_present(turn.keys), self._num_known(turn.keys)} - {0}:
            row = rows.find(turn.keys[count - 1])
            rows.kind[row] = max(rows.kind[row], Kind.KEPT)
            rows.until[row] = max(rows.until[row], rows.now + self._config.wake_deadline_seconds)

    def _load(self, turn: Turn) -> None:
        """Start to bring to HBM what slots can be had for."""
        rows = self._loadable(turn.keys, self._num_present(turn.keys))
        slots = self._slots(len(rows), turn.tenant)
        if slots:
            wake = self._wake(rows[: len(slots)], Tier.HBM)
            wake.take(slots)
            wake.start()
            self._blocks.hbm.close(wake.reserve)

    def _lift(self, turn: Turn) -> None:
        """Start to bring to DRAM what is below it: prefixes leave a tier after tails, so that is the chain's end."""
        if not self._blocks.has_tier(Tier.NVME) or not self._blocks.has_tier(Tier.DRAM):
            return
        dram = self._blocks.pools[Tier.DRAM]
        first = self._first(turn.keys, lambda row: not dram.is_present(row), self._num_present(turn.keys))
        # Above the high mark the upkeep would drop it again, since it has a copy below.
        room = max(0, int(dram.capacity * self._config.dram_high) - dram.num_used)
        rows = self._loadable(turn.keys, first)[:room]
        if rows:
            self._wake(rows, Tier.DRAM).start()

    def _wake(self, rows: list[int], target: Tier) -> Wake:
        """Never begun, so it pins nothing: it is only asked to start."""
        num_slots = len(rows) if target is Tier.HBM else 0
        deadline = self._blocks.rows.now + self._config.wake_deadline_seconds
        return Wake(store=self._store, rows=rows, num_slots=num_slots, deadline=deadline, target=target)

    def _slots(self, count: int, tenant: int) -> list[int]:
        """At most `count` slots of HBM that cost nobody anything."""
        blocks, hbm = self._blocks, self._blocks.hbm
        while hbm.num_free < count:
            row, _ = hbm.shares.victim(tenant)
            if row == NO_ROW or hbm.frontier.worth(row)[0] > Kind.NORMAL or not blocks.has_copy_below(Tier.HBM, row):
                break
            blocks.totals.released += 1
            blocks.drop(Tier.HBM, row)
        return hbm.open(min(count, hbm.num_free))

    # --- chains -----------------------------------------------------------------------

    def _loadable(self, keys: list[BlockKey], first: int) -> list[int]:
        """Rows from block `first` on that can come, as many as transfers may be started for at once."""
        rows: list[int] = []
        for key in keys[first : first + self._config.max_transfers * RUN_BLOCKS]:
            row = self._blocks.rows.find(key)
            if row == NO_ROW or not self._blocks.can_come(row):
                break
            rows.append(row)
        return rows

    def _num_present(self, keys: list[BlockKey]) -> int:
        """Blocks that are in HBM, or on their way there."""
        hbm = self._blocks.hbm
        return self._first(keys, lambda row: not hbm.is_present(row))

    def _num_known(self, keys: list[BlockKey]) -> int:
        """Blocks that are in any tier."""
        return self._first(keys, lambda _row: False)

    def _first(self, keys: list[BlockKey], is_beyond: Callable[[int], bool], start: int = 0) -> int:
        """The first block of the chain from `start` on that is unknown or `is_beyond`, as all after it are."""
        find = self._blocks.rows.find

        def beyond(key: BlockKey) -> bool:
            row = find(key)
            return row == NO_ROW or is_beyond(row)

        return bisect_left(keys, True, lo=start, key=beyond)

    def _row(self, keys: list[BlockKey], index: int) -> int:
        return self._blocks.rows.find(keys[index]) if index < len(keys) else NO_ROW
