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
