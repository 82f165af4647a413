"""The sum of P @ V has one order, however many query rows there are."""

from __future__ import annotations

import pytest
import torch

from models.attention import BATCHED_ROWS_MAX, TILE_TOKENS, tiles_times_values


@pytest.mark.parametrize(
    "keys", [64, TILE_TOKENS, 2 * TILE_TOKENS, 16 * TILE_TOKENS, 16 * TILE_TOKENS + 64, 5504, 8192]
)
def test_few_rows_and_many_sum_their_tiles_alike(keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    rows = 2 * BATCHED_ROWS_MAX
    scores = torch.randn((3, rows, keys), generator=generator).mul_(3).bfloat16()
    probabilities = torch.softmax(scores, -1)
    values = torch.randn((3, keys, 64), generator=generator).bfloat16()
    many = tiles_times_values(probabilities, values)
    for count in (2, 3, 9, BATCHED_ROWS_MAX):
        few = tiles_times_values(probabilities[:, :count].contiguous(), values)
        assert torch.equal(few, many[:, :count])
