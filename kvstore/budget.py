"""Bytes written to NVMe in the last 24 hours, against what the drive is rated for (pure).

Counted by the hour, so what is called the last day is between 23 and 24 hours. Across a restart
the count begins anew.
"""

from __future__ import annotations

from typing import Final

HOUR_SECONDS: Final = 3600.0
HOURS: Final = 24
RESUME_SHARE: Final = 0.95
"""Of the rating: below it writing every turn begins again, so that it does not change with every block."""


class WriteBudget:
    """`rated` is in bytes a day; 0: no limit."""

    def __init__(self, rated: int) -> None:
        self._rated = rated
        self._hours = [0] * HOURS
        self._hour = 0
        self._is_over = False

    def note(self, num_bytes: int, now: float) -> None:
        """These have been written."""
        self._advance(now)
        self._hours[self._hour % HOURS] += num_bytes

    def last_day(self, now: float) -> int:
        """Bytes written in the last 24 hours."""
        self._advance(now)
        return sum(self._hours)

    def is_over(self, now: float) -> bool:
        """Has more been written than the drive should bear?"""
        if not self._rated:
            return False
        limit = self._rated * RESUME_SHARE if self._is_over else self._rated
        self._is_over = self.last_day(now) >= limit
        return self._is_over

    def _advance(self, now: float) -> None:
        hour = int(now // HOUR_SECONDS)
        for passed in range(max(self._hour + 1, hour - HOURS + 1), hour + 1):
            self._hours[passed % HOURS] = 0
        self._hour = max(self._hour, hour)
