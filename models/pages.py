"""Memory in huge pages, where Linux gives them: what a step reads all of, or here and there over gigabytes."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 1024 * 1024


def huge(elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU whose pages are taken as they are touched; small ones where it is small or Linux has
    no others."""
    size = elements * dtype.itemsize
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(elements, dtype=dtype)
    # Private: shared memory, Python's default, has another switch for huge pages, which is off nearly everywhere.
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skipped : skipped + size].view(dtype)
