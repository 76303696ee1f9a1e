"""Memory for what stays: packed weights, keys and values, adapters."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

CHUNK = 32 * 1024 * 1024
"""Bytes that are asked of the system at once, for many weights together; a larger tensor gets a chunk of its own."""

ALIGNMENT = 64
"""Of every tensor, in bytes: a cache line and a vector."""


class HugePages:
    """Hands out tensors in huge pages where the system has them.

    A step walks through all of its weights; in pages of 4 KiB the translation of their addresses alone costs a tenth of
    the bandwidth. A tensor of some hundred KiB gets no huge page of its own, so many share a chunk, which is given
    back with the last of them. As any fresh memory, a chunk takes up room only where it is written.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], of any content, aligned to 64 bytes."""
        size = numel * dtype.itemsize
        if size > len(self._chunk) - self._used:
            if size > CHUNK // 2:
                return _chunk(size)[:size].view(dtype)
            self._chunk, self._used = _chunk(CHUNK), 0
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._chunk[start : start + size].view(dtype)


def _chunk(size: int) -> Tensor:
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    # Private: memory that is shared with forked children, as Python's default is, gets no huge pages.
    memory = mmap.mmap(-1, max(size, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
