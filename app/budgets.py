"""What a key may use in a minute: requests and tokens, each a bucket that fills again as time passes.

    x-ratelimit-limit-requests       the most in a minute
    x-ratelimit-remaining-requests   what is left now
    x-ratelimit-reset-requests       when all of it is there again, in OpenAI's form: 6m0s, 1s, 20ms

A request is taken when it arrives. Its tokens are known only later, so they may take the bucket below empty: then
nothing more is begun until it has filled that far. A client that asks for little at a time meets the same limit as
one that asks for much.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MINUTE = 60.0


class Bucket:
    """`per_minute` units, and as many again every minute; 0 is no limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        assert per_minute >= 0
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def is_limited(self) -> bool:
        return self.per_minute > 0

    @property
    def level(self) -> float:
        """What is left; below zero where more was used than there was."""
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._filled_at) * self.per_minute / MINUTE)
        self._filled_at = now
        return self._level

    def wait_for(self, amount: float) -> float:
        """Seconds until `amount` is there, 0 when it is."""
        if not self.is_limited:
            return 0.0
        return max(0.0, (amount - self.level) * MINUTE / self.per_minute)

    def take(self, amount: float) -> None:
        """Use `amount`, there or not."""
        if self.is_limited:
            self._level = self.level - amount


@dataclass(frozen=True, slots=True)
class Spent:
    """A budget that holds nothing more now: `kind` is requests or tokens."""

    kind: str
    per_minute: int
    wait_seconds: float


class Budget:
    """Requests and tokens of one key."""

    def __init__(
        self, requests_per_minute: int = 0, tokens_per_minute: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests = Bucket(requests_per_minute, clock)
        self.tokens = Bucket(tokens_per_minute, clock)

    def begin(self) -> Spent | None:
        """Take one request, unless a budget is spent; then nothing is taken."""
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            wait = bucket.wait_for(1)
            if wait > 0:
                return Spent(kind, bucket.per_minute, wait)
        self.requests.take(1)
        return None

    def headers(self) -> Iterator[tuple[str, str]]:
        """OpenAI's, for the budgets that are limited."""
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.is_limited:
                yield f"x-ratelimit-limit-{kind}", str(bucket.per_minute)
                yield f"x-ratelimit-remaining-{kind}", str(max(0, int(bucket.level)))
                yield f"x-ratelimit-reset-{kind}", spelled(bucket.wait_for(bucket.per_minute))


def spelled(seconds: float) -> str:
    """A duration as OpenAI's headers have it: `1m0.5s`, `2s`, `35ms`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{text}s" if minutes else f"{text}s"
