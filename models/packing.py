"""Weights laid out once for the CPU's bf16 matmul kernels.

oneDNN multiplies by a weight in blocks of its own layout. Given a plain [out, in] tensor it
rearranges all of it on every call, which for one token costs more than the multiplication:
packing once made a decode step 1.7 times cheaper (docs/performance.md). The arithmetic is
the same, bit for bit; torch.compile's freezing does likewise, and its operators are used here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed weight: [..., in_features] -> [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, None)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """For code that asks a layer for its dtype or device; its layout is oneDNN's own."""
        return self.packed

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return product


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Are linear layers of this kind packed here? Not where torch was built without oneDNN."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and device.type == "cpu" and dtype is torch.bfloat16


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers that `packs` tells of by packed ones; returns how many.

    Only exact `nn.Linear`: subclasses may do more.
    """
    found = list(_linears(model))
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear))
    return len(found)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child._forward_hooks or child._forward_pre_hooks:
                continue
            if packs(child.weight.device, child.weight.dtype):
                yield parent, name, child
