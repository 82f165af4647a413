"""Private blocks of a suspended turn: what it had computed and could not publish (pure).

Mostly the one partial block at its end; every block of a turn that asked for no cache. They
lie in turn-private OPEN slots of DRAM and come back as they were, so that nothing is
computed again. If any of it is lost, the rest is of no use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.types import Tier


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

    def slots_in(self, tier: Tier) -> list[int]:
        """OPEN slots it owns in `tier`."""
        if tier is Tier.HBM:
            return list(self.hbm.values())
        return list(self.dram.values()) if tier is Tier.DRAM else []

    @property
    def is_back(self) -> bool:
        """Whole, and in HBM."""
        return not self.is_lost and len(self.hbm) == self.num_blocks
