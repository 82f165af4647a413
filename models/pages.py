"""Memory in huge pages, where Linux gives them: what a step reads all of, or here and there over gigabytes."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 1024 * 1024


def huge(elements: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU; in small pages where it is small or the system has no others."""
    size = elements * dtype.itemsize
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(elements, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skipped : skipped + size].view(dtype)
