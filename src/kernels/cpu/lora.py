"""What the native library is told of a step's adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motet.kernels.cpu.weights import FORMATS

SEGMENT_ROWS = 32
"""Longer segments are cut: their pieces are shared out among threads, and the rows of one stay in the cache."""


@dataclass(frozen=True)
class CpuLoRA:
    """A step's adapters, behind one address: another step's header, copied over this one, makes it that step's."""

    format: str  # of the arena
    header: Tensor  # [6] int64, as `Plan` in lora.cpp
    memory: tuple[Tensor, ...]  # what the header points to

    @classmethod
    def of(cls, arena: Tensor, table: Tensor, acts: Tensor, segments: Tensor) -> CpuLoRA:
        """As `Ops.plan_lora`."""
        pieces = _cut(segments)
        header = torch.tensor(
            (
                arena.data_ptr(),
                table.data_ptr(),
                table.shape[1],
                acts.data_ptr(),
                pieces.data_ptr(),
                len(pieces),
            )
        )
        return cls(FORMATS[arena.dtype], header, (arena, table, acts, pieces))


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
