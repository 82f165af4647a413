"""Packed linear layers compute what plain ones do, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.packing import PackedLinear, pack_linears


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 300])
def test_a_packed_layer_has_the_bits_of_a_plain_one(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(192, 320, bias=has_bias).bfloat16()
    given = torch.randn(1, rows, 192).bfloat16()
    with torch.inference_mode():
        assert torch.equal(PackedLinear(plain)(given), plain(given))


def test_only_plain_bf16_layers_are_packed() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {"plain": nn.Linear(8, 8).bfloat16(), "fp32": nn.Linear(8, 8), "special": Special(8, 8).bfloat16()}
    )
    assert pack_linears(model) == 1
    assert isinstance(model["plain"], PackedLinear)
    assert model["plain"].weight.dtype is torch.bfloat16
    assert type(model["fp32"]) is nn.Linear
    assert type(model["special"]) is Special
