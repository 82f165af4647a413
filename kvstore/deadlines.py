"""Moments at which things are due, each thing with at most one (pure)."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")

STALE_ALLOWED = 64
"""Entries that may be out of date before the heap is made anew; then as many as are valid."""


class Deadlines(Generic[T]):
    """Set, moved and taken back at O(log n); an entry of the heap that is no longer true is passed over."""

    def __init__(self) -> None:
        self._due: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._due)

    @property
    def num_entries(self) -> int:
        """Of the heap, those no longer true among them."""
        return len(self._heap)

    def set(self, thing: T, due: float) -> None:
        """`thing` is due then, and no longer at the moment it had before."""
        if self._due.get(thing) == due:
            return
        self._due[thing] = due
        self._serial += 1  # things need no order among themselves
        heapq.heappush(self._heap, (due, self._serial, thing))
        if len(self._heap) > 2 * len(self._due) + STALE_ALLOWED:
            self._heap = [(when, index, each) for index, (each, when) in enumerate(self._due.items())]
            heapq.heapify(self._heap)

    def discard(self, thing: T) -> None:
        """`thing` is never due; it may have had no moment."""
        self._due.pop(thing, None)

    def has(self, thing: T) -> bool:
        """Is `thing` due at some moment?"""
        return thing in self._due

    def next(self) -> float | None:
        """The earliest moment."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[T]:
        """All that is due by `now`, in order; no longer here afterwards."""
        taken: list[T] = []
        while (due := self.next()) is not None and due <= now:
            thing = heapq.heappop(self._heap)[2]
            del self._due[thing]
            taken.append(thing)
        return taken
