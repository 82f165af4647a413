"""Two clocks at one moment: what runs is kept by the monotonic one; what outlives the process, and what is shown,
by the wall's (pure).

The wall clock may be set, back or ahead, at any time. A moment that it calls the future cannot have been, so it
counts as now: nothing is then older than it is, and what would have expired does so a little later.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Both, in seconds, read together."""

    monotonic: float
    wall: float

    def unix(self, moment: float) -> float:
        """Unix seconds of a monotonic moment, to the millisecond."""
        return round(self.wall + moment - self.monotonic, 3)

    def moment(self, unix: float) -> float:
        """The monotonic moment of Unix seconds; negative where it was before the machine started."""
        return self.monotonic + unix - self.wall

    def past(self, unix: float) -> float:
        """As `moment`, of something that has been: now, at the latest."""
        return min(self.monotonic, self.moment(unix))
