"""Packed weights: a linear's [N, K] as the native library reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32
"""Columns (of the linear's output) that lie together, as in `linear.cpp`."""

FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""How ops of the library end their names, by the dtype that they are compiled for."""


@dataclass(frozen=True)
class PackedWeight:
    """Float32 as [N / 32, K, 32], bf16 as [N / 32, K / 2, 32, 2]; what lacks to whole panels and pairs is 0."""

    format: str  # "f32" or "bf16"
    data: Tensor  # flat
    columns: int  # N
    inner: int  # K

    @classmethod
    def empty(cls, columns: int, inner: int, dtype: torch.dtype) -> PackedWeight:
        depth = inner + inner % 2 if dtype == torch.bfloat16 else inner
        data = torch.empty(-(-columns // PANEL) * PANEL * depth, dtype=dtype)
        return cls(FORMATS[dtype], data, columns, inner)
