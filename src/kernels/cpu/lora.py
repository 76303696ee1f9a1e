"""What the native library is told of a step's adapters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet.kernels.cpu.weights import FORMATS

SEGMENT_ROWS = 32
"""Longer segments are cut: their pieces are shared out among threads, and the rows of one stay in the cache."""


@dataclass(frozen=True)
class CpuLoRA:
    """A step's adapters, behind one address: a recorded step is given that of another's header.

    Two plans never share a header, so a recording can tell them apart.
    """

    format: str  # of the arena
    header: Tensor  # [6] int64, as `Plan` in lora.cpp
    memory: tuple[Tensor, ...]  # what the header points to

    @classmethod
    def of(cls, arena: Tensor, table: Tensor, acts: Tensor, segments: Tensor) -> CpuLoRA:
        """As `Ops.plan_lora`."""
        pieces = _cut(segments)
        tables = (arena.data_ptr(), table.data_ptr(), table.shape[1], acts.data_ptr())
        header = np.array((*tables, pieces.data_ptr(), len(pieces)), dtype=np.int64)
        return cls(FORMATS[arena.dtype], torch.from_numpy(header), (arena, table, acts, pieces))


def _cut(segments: Tensor) -> Tensor:
    """The segments [n, 3] in pieces of at most SEGMENT_ROWS."""
    rows = segments.numpy()
    if not len(rows) or (rows[:, 2] - rows[:, 1]).max() <= SEGMENT_ROWS:
        return segments.contiguous()
    pieces = [
        (slot, row, min(row + SEGMENT_ROWS, last))
        for slot, first, last in rows.tolist()
        for row in range(first, last, SEGMENT_ROWS)
    ]
    return torch.tensor(pieces)
