"""Restore or recompute: what it takes to read a block from a tier, and to compute it again (pure).

Both are running means, seeded by what start-up measured, and judged by what was seen lately:
a sum of blocks over a sum of seconds, of which each new observation makes older ones count for
less. Reads are timed by the time in which at least one from the tier is under way, so copies
that share a disk are not each charged for it alone.

    restore(k)     seconds until the first k missing blocks are in HBM: those already being read
                   from a tier come first, and what comes from NVMe passes DRAM as well
    recompute(k)   seconds of prefill for the tokens of k blocks

A chain is restored as far as that gains most; what was never measured is taken to be worth
restoring. The mean rate of prefill is that of short contexts mostly, and long ones are slower: so
a recompute counts for `RECOMPUTE_MARGIN` of what the mean says. A rate that nothing has
confirmed for a while falls back to its seed, or a tier that was slow once would never be read,
and so never measured, again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.config import PlannerConfig

KEPT_SHARE: Final = 0.95
"""Of what was seen before, with each new observation: about the last twenty count."""
LEAST_PREFILL_TOKENS: Final = 32
"""A step with fewer tells more of its overhead than of the rate."""
RECOMPUTE_MARGIN: Final = 1.25
CONFIRMED_SECONDS: Final = 60.0


class Rate:
    """Things per second, lately; 0 while nothing is known."""

    def __init__(self, seed: float) -> None:
        self._seed = seed
        self._noted_at = float("-inf")
        self._things = self._seconds = 0.0

    def per_second(self, now: float) -> float:
        if self._is_stale(now) or not self._seconds:
            return self._seed
        return self._things / self._seconds

    def note(self, things: float, seconds: float, now: float) -> None:
        """`things` took `seconds`; none when they came together with what was noted last."""
        if self._is_stale(now):
            self._things, self._seconds = self._seed, 1.0 if self._seed else 0.0
        self._noted_at = now
        if seconds > 0.0:
            self._things *= KEPT_SHARE
            self._seconds *= KEPT_SHARE
        self._things += things
        self._seconds += seconds

    def _is_stale(self, now: float) -> bool:
        return self._noted_at + CONFIRMED_SECONDS < now


class Reads:
    """How fast blocks come from one tier, by when reads begin and end."""

    def __init__(self, blocks_per_second: float) -> None:
        self.rate = Rate(blocks_per_second)
        self.num_under_way = 0  # blocks
        self._num_reads = 0
        self._busy_since = 0.0

    def begin(self, blocks: int, now: float) -> None:
        if not self._num_reads:
            self._busy_since = now
        self._num_reads += 1
        self.num_under_way += blocks

    def end(self, blocks: int, arrived: int, now: float) -> None:
        """Of a read of `blocks`, `arrived` came."""
        self._num_reads -= 1
        self.num_under_way -= blocks
        if arrived:
            self.rate.note(arrived, now - self._busy_since, now)
            self._busy_since = now


class Cost:
    """See the module."""

    def __init__(self, config: PlannerConfig) -> None:
        self._block_tokens = config.block_tokens
        self._is_asked = config.cost_gate == "auto"
        self.prefill = Rate(config.prefill_tokens_per_second)
        self.reads = {
            Tier.DRAM: Reads(config.dram_blocks_per_second),
            Tier.NVME: Reads(config.nvme_blocks_per_second),
        }

    def note_step(self, seconds: float, prefill_tokens: int, decode_tokens: int, now: float) -> None:
        """A step computed so many tokens of prompts and of answers; only mostly-prefill ones tell the rate."""
        if prefill_tokens >= max(LEAST_PREFILL_TOKENS, decode_tokens):
            self.prefill.note(prefill_tokens + decode_tokens, seconds, now)

    def read_rate(self, tier: Tier, now: float) -> float:
        """Blocks per second from `tier`; 0 where it was not measured, and for HBM."""
        return self.reads[tier].rate.per_second(now) if tier in self.reads else 0.0

    def decides(self, now: float) -> bool:
        """Could it be that something is cheaper to compute again?"""
        return self._is_asked and self.prefill.per_second(now) > 0.0

    def num_worth_restoring(self, sources: Sequence[Tier], now: float) -> int:
        """How many blocks of a missing chain to read, the first so many of it; `sources` say from where each comes."""
        recompute = RECOMPUTE_MARGIN * self._block_tokens / self.prefill.per_second(now)
        seconds = {tier: self._seconds_per_block(tier, now) for tier in self.reads}
        waits = {tier: reads.num_under_way * seconds[tier] for tier, reads in self.reads.items()}
        gain, most, best = 0.0, 0.0, 0
        for count, tier in enumerate(sources, 1):
            gain += recompute - seconds[tier] - waits[tier]
            waits[tier] = 0.0  # waited for once
            if gain >= most:
                most, best = gain, count
        return best

    def _seconds_per_block(self, tier: Tier, now: float) -> float:
        """To bring one block to HBM; what was never measured costs nothing."""
        own = self.reads[tier].rate.per_second(now)
        above = self.reads[Tier.DRAM].rate.per_second(now) if tier is Tier.NVME else 0.0
        return (1.0 / own if own else 0.0) + (1.0 / above if above else 0.0)
