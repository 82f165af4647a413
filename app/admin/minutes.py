"""What was counted in each of the last minutes, and sums over the latest of them (pure).

One row a minute, one column a name, in a ring: a day of it is a megabyte or two, however much happens. Sums over the
minutes that are over are kept until the next one begins, so that asking every second costs one addition of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

DAY_MINUTES = 1440

Row = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[tuple[int, int], np.dtype[np.float64]]

NO_MINUTE = -1


class Minutes:
    """Counts by minute. A minute is any integer that never goes back."""

    def __init__(self, names: Iterable[str], kept: int = DAY_MINUTES) -> None:
        self.names = tuple(names)
        self._kept = kept
        self._columns = {name: index for index, name in enumerate(self.names)}
        assert len(self._columns) == len(self.names), "a name is there twice"
        self._rows: Rows = np.zeros((kept, len(self.names)))
        self._minute_of = np.full(kept, NO_MINUTE, dtype=np.int64)
        self._latest = NO_MINUTE
        self._over: dict[int, Row] = {}

    @property
    def num_bytes(self) -> int:
        """Of memory, from the first minute on."""
        return int(self._rows.nbytes + self._minute_of.nbytes)

    def add(self, minute: int, amounts: Mapping[str, float]) -> None:
        """Count `amounts` by name in `minute`; one before the latest counts there."""
        row = self._row(minute)
        for name, amount in amounts.items():
            row[self._columns[name]] += amount

    def sums(self, minute: int, count: int) -> dict[str, float]:
        """By name, over the `count` minutes that end with `minute`, itself included."""
        row = self._row(minute)
        if count not in self._over:
            self._over[count] = self._between(self._latest - count + 1, self._latest)
        return dict(zip(self.names, (self._over[count] + row).tolist(), strict=True))

    def series(self, minute: int, count: int, names: Iterable[str], step: int = 1) -> dict[str, list[float]]:
        """By name, over each `step` minutes of the `count` that end with `minute`, oldest first."""
        assert count % step == 0
        self._row(minute)
        wanted = list(names)
        places = np.arange(self._latest - count + 1, self._latest + 1)
        rows = self._rows[places % self._kept][:, [self._columns[name] for name in wanted]]
        rows[self._minute_of[places % self._kept] != places] = 0.0
        steps = rows.reshape(count // step, step, len(wanted)).sum(axis=1)
        return {name: steps[:, index].tolist() for index, name in enumerate(wanted)}

    def _row(self, minute: int) -> Row:
        """The current minute's; what it displaces is a day old."""
        if minute > self._latest:
            self._latest = minute
            self._over.clear()
            self._rows[minute % self._kept] = 0.0
            self._minute_of[minute % self._kept] = minute
        row: Row = self._rows[self._latest % self._kept]
        return row

    def _between(self, start: int, end: int) -> Row:
        """Sums over minutes [start, end)."""
        chosen = (self._minute_of >= start) & (self._minute_of < end)
        total: Row = self._rows[chosen].sum(axis=0)
        return total


def quantile(bounds: tuple[float, ...], counts: Iterable[float], share: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; None where nothing was counted.

    `counts` are those of each bucket, the last one beyond all `bounds`, where the last bound is the answer.
    """
    by_bucket = list(counts)
    assert len(by_bucket) == len(bounds) + 1
    rank = share * sum(by_bucket)
    if rank <= 0:
        return None
    below = 0.0
    for index, count in enumerate(by_bucket[:-1]):
        if count and below + count >= rank:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (rank - below) / count
        below += count
    return bounds[-1]
