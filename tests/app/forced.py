"""A way of sampling that makes the real model say what a test wants; nothing that comes over HTTP reaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from models.sampling import SamplingRow


class Forced:
    """Chooses the ids set for a row's seed, then an end; rows of other seeds are sampled as ever."""

    def __init__(self, end_id: int) -> None:
        self.scripts: dict[int, list[int]] = {}
        self._end_id = end_id

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """As models.sampling.sample."""
        return [
            self._forced(row) if row.params.seed in self.scripts else chosen
            for row, chosen in zip(rows, sample(logits, rows), strict=True)
        ]

    def _forced(self, row: SamplingRow) -> int:
        script = self.scripts[row.params.seed]
        return script[row.num_output_tokens] if row.num_output_tokens < len(script) else self._end_id


class InOrder:
    """Has the model say the scripts one after the other, one a turn, whatever seed a client leaves to the server.

    A turn is known by its seed, so clients that send none, one turn at a time. After the last script it is the model
    that speaks.
    """

    def __init__(self, end_id: int) -> None:
        self._forced = Forced(end_id)
        self._waiting: list[list[int]] = []
        self._seeds: set[int] = set()

    def say_next(self, scripts: Sequence[list[int]]) -> None:
        """What the next turns say; nothing of what was to be said before."""
        self._waiting = list(scripts)

    @property
    def is_done(self) -> bool:
        """All scripts were said, or are being said."""
        return not self._waiting

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """As models.sampling.sample."""
        for row in rows:
            if row.params.seed not in self._seeds:
                self._seeds.add(row.params.seed)
                if self._waiting:
                    self._forced.scripts[row.params.seed] = self._waiting.pop(0)
        return self._forced(logits, rows)
