"""Which tiers can be trusted (pure).

    OK       read and written
    SUSPECT  read; nothing new is put there. Said from outside, or for `tier_backoff_seconds`
             after it did not take a block, or not in time, or could not read one
    OFF      neither. Said from outside, or after several deadlines in a row on its reads; then it
             is asked from time to time whether it works, one question at a time: a tier that
             hangs does not answer, and asking again would only hang more threads

Reads that are late at the same moment are one deadline: they are one stall.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.events import ProbeTier, TierHealth
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.config import PlannerConfig
    from kvstore.events import Action


class Health:
    """Of each tier of one store; HBM is always OK."""

    def __init__(self, config: PlannerConfig, num_tiers: int, emit: Callable[[Action], None]) -> None:
        self._config = config
        self._emit = emit
        self._said = [TierHealth.OK] * num_tiers
        self._retry_at = [0.0] * num_tiers
        self._late_reads = [0] * num_tiers
        self._last_late = [float("-inf")] * num_tiers
        self._probe_at: list[float | None] = [None] * num_tiers

    def of(self, tier: Tier, now: float) -> TierHealth:
        """What is thought of `tier` now."""
        if self._said[tier] is TierHealth.OK and self._retry_at[tier] > now:
            return TierHealth.SUSPECT
        return self._said[tier]

    def takes(self, tier: Tier, now: float) -> bool:
        """May anything be put there?"""
        return self._said[tier] is TierHealth.OK and self._retry_at[tier] <= now

    def is_readable(self, tier: Tier) -> bool:
        return self._said[tier] is not TierHealth.OFF

    def set(self, tier: Tier, health: TierHealth, now: float) -> None:
        """Somebody who knows says so."""
        self._said[tier] = health
        self._late_reads[tier] = 0
        self._probe_at[tier] = now + self._config.probe_seconds if health is TierHealth.OFF else None
        if health is TierHealth.OK:
            self._retry_at[tier] = 0.0

    def distrust(self, tier: Tier, now: float) -> None:
        """`tier` did not take a block, or not in time, or could not read one."""
        self._retry_at[tier] = now + self._config.tier_backoff_seconds

    def note_read(self, tier: Tier) -> None:
        """A read of `tier` has ended in time."""
        self._late_reads[tier] = 0

    def note_late_read(self, tier: Tier, now: float) -> bool:
        """A read of `tier` is past its deadline; True if the tier is OFF because of it."""
        if self._last_late[tier] == now or self._said[tier] is TierHealth.OFF:
            return False
        self._last_late[tier] = now
        self._late_reads[tier] += 1
        if self._late_reads[tier] < self._config.late_reads_until_off:
            return False
        self.set(tier, TierHealth.OFF, now)
        return True

    def probe(self, now: float) -> None:
        """Ask the tiers that are due."""
        for tier, due in enumerate(self._probe_at):
            if due is not None and due <= now:
                self._probe_at[tier] = None
                self._emit(ProbeTier(Tier(tier)))

    def next_probe(self) -> float | None:
        return min((due for due in self._probe_at if due is not None), default=None)

    def retry_at(self, tier: Tier) -> float:
        """When `tier` may be given something again, as far as that is a matter of time."""
        return self._retry_at[tier]
