"""What granted turns hold: their block tables, and the pin on the chain they attend to (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.events import GrantTurn
from kvstore.rows import NO_ROW
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.config import PlannerConfig
    from kvstore.events import Fill
    from kvstore.store import Store
    from kvstore.turns import Turn
    from kvstore.wakes import Wake


class Tables:
    """Operations on the block tables of turns; see `Turn` for what a table is."""

    def __init__(self, store: Store, config: PlannerConfig) -> None:
        self._store = store
        self._blocks = store.blocks
        self._hbm = store.blocks.hbm
        self._rows = store.blocks.rows
        self._config = config

    def take_over(self, turn: Turn, wake: Wake) -> GrantTurn:
        """Make what `wake` holds the block table of `turn`."""
        wake.give_back_surplus()
        num_rows, tail = len(wake.rows), wake.tail
        cached = num_rows * self._config.block_tokens if tail is None else tail.tokens
        reused = self._count_origins(wake.rows)
        turn.tip, slots, reserve = wake.hand_over()
        turn.open = dict(enumerate(slots[num_rows:], num_rows))
        turn.num_blocks = len(slots)
        table = (*slots, *self.append(turn, reserve))
        seconds = self._rows.now - (wake.deadline - self._config.wake_deadline_seconds)
        miss, turn.miss = wake.miss or turn.miss, None
        return GrantTurn(turn.id, table, cached, turn.suspended, reused, miss, seconds, turn.woken_from_queue)

    def append(self, turn: Turn, slots: list[int]) -> tuple[int, ...]:
        """Append OPEN slots."""
        turn.open.update(enumerate(slots, turn.num_blocks))
        turn.num_blocks += len(slots)
        return tuple(slots)

    def fill(self, turn: Turn, fill: Fill) -> None:
        """An OPEN slot of `turn` was filled: publish its block, unless the first copy was another turn's."""
        if not turn.cache:
            return
        turn.note_key(fill.index, fill.key)
        rows, tip = self._rows, turn.tip
        if fill.index != (0 if tip == NO_ROW else rows.depth[tip] + 1):
            return  # its parent is not in the turn's chain: publishing would break prefix closure
        row = rows.find(fill.key)
        if row == NO_ROW:
            row = rows.add(fill.key, tip, turn.tenant)
        assert rows.parent[row] == tip, f"turn {turn.id} filled a block whose key names another parent"
        if self._hbm.is_valid(row):
            self._blocks.totals.duplicate_fills += 1  # first copy won: this one stays private to the turn
        else:
            self._store.publish(row, turn.open.pop(fill.index))
        self._move_tip(turn, row)

    def put_tail_away(self, turn: Turn, computed_tokens: int) -> None:
        """Keep what a suspended turn has computed and not published; K/V exist for `computed_tokens`."""
        first = 0 if turn.tip == NO_ROW else self._rows.depth[turn.tip] + 1
        indices = range(first, self._config.blocks_for(computed_tokens))
        if indices and self._blocks.has_tier(Tier.DRAM):
            slots = [turn.open.pop(index) for index in indices]
            turn.tail = self._store.tails.put_away(first, slots, computed_tokens, turn.tenant)

    def release(self, turn: Turn) -> None:
        """The engine has left `turn` alone: free its OPEN slots and let its chain rest."""
        self._hbm.close(list(turn.open.values()))
        turn.open.clear()
        turn.num_blocks = 0
        if turn.tip != NO_ROW:
            self._rows.touch(turn.tip)
            self._blocks.cleaner.rest(turn.tip)
            self._move_tip(turn, NO_ROW)

    def give_up_duplicates(self, turn: Turn) -> None:
        """Let go of published copies of blocks that `turn`, which runs alone, also holds privately.

        Its own blocks below the first such block become private too, since HBM is closed under
        prefixes; then the turn holds its block table and nothing else, so what fits alone does.
        """
        first, row = min(turn.open, default=turn.num_blocks), turn.tip
        num_given_up = 0 if row == NO_ROW else self._rows.depth[row] + 1 - first
        if num_given_up <= 0 or self._hbm.num_held_alone(row) < num_given_up:
            return  # none, or someone else needs one of them
        tip = row
        for _ in range(num_given_up):
            tip = self._rows.parent[tip]
        self._move_tip(turn, tip)
        while row != tip:
            parent, index = self._rows.parent[row], self._rows.depth[row]
            if index in turn.open:
                self._blocks.totals.evicted += 1
                self._blocks.drop(Tier.HBM, row)
            else:
                turn.open[index] = self._blocks.reopen(row)
            row = parent

    def _move_tip(self, turn: Turn, row: int) -> None:
        """Pin `row` in place of the turn's tip: the new one first, so that the chain is never unprotected."""
        if row != NO_ROW:
            self._hbm.pin(row)
        if turn.tip != NO_ROW:
            self._blocks.unpin(Tier.HBM, turn.tip)
        turn.tip = row

    def _count_origins(self, rows: list[int]) -> tuple[int, int, int]:
        """Count `rows` by the tier they came from; from now on they count as never having left."""
        origin = self._rows.origin
        counts = [0, 0, 0]
        for row in rows:
            counts[origin[row]] += 1
            origin[row] = Tier.HBM
        return counts[0], counts[1], counts[2]
