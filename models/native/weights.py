"""Matrices of linear layers in the order in which matmul.c reads them."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.pages import huge

if TYPE_CHECKING:
    from collections.abc import Sequence

PANEL_COLUMNS = 32
"""PANEL of kernels.h."""


@dataclass(frozen=True, slots=True)
class Packed:
    """[columns / 32, k / 2, 32, 2] and the bias in the same order, both bf16."""

    weight: Tensor
    bias: Tensor | None

    @property
    def bias_pointer(self) -> int | None:
        return None if self.bias is None else self.bias.data_ptr()


def pack(library: ctypes.CDLL, linears: Sequence[nn.Linear]) -> Packed:
    """Several layers of one input as one matrix, their columns one after the other."""
    weight = torch.cat([linear.weight.data for linear in linears]) if len(linears) > 1 else linears[0].weight.data
    columns = -(-len(weight) // PANEL_COLUMNS) * PANEL_COLUMNS
    order = torch.full((columns,), -1)
    order[: len(weight)] = torch.arange(len(weight))
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.zeros(columns, dtype=weight.dtype)
        parts = [weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        bias[: len(weight)] = torch.cat([part.data for part in parts])
    return Packed(_ordered(library, weight, order), bias)


def pack_gated(library: ctypes.CDLL, gate: nn.Linear, up: nn.Linear) -> Packed:
    """Each panel: 16 columns of `gate`, then the same 16 of `up`, so that one register tile holds both."""
    inner = gate.out_features
    columns = torch.arange(inner).view(-1, 1, PANEL_COLUMNS // 2)
    order = torch.cat((columns, columns + inner), 1).reshape(-1)
    return Packed(_ordered(library, torch.cat((gate.weight.data, up.weight.data)), order), None)


def _ordered(library: ctypes.CDLL, weight: Tensor, order: Tensor) -> Tensor:
    weight, order = weight.contiguous(), order.contiguous()
    packed = huge(len(order) * weight.shape[1], weight.dtype)
    library.dormouse_pack(
        c_void_p(weight.data_ptr()),
        c_void_p(order.data_ptr()),
        c_void_p(packed.data_ptr()),
        c_int64(weight.shape[1]),
        c_int64(len(order)),
    )
    return packed
