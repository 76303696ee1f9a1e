"""Packed weights: a linear's [N, K] as the native library reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32
"""Columns (of the linear's output) that lie together, as in `panels.h`."""

QUAD = 4
"""Bytes along K that are multiplied at once, as in `quantise.h`."""

FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""How ops of the library end their names, by the dtype that they are compiled for."""


@dataclass(frozen=True)
class PackedWeight:
    """Panels of 32 columns; what lacks to whole panels, pairs and quads weighs nothing.

    Float32 as [N / 32, K, 32], bf16 as [N / 32, K / 2, 32, 2], int8 as [N / 32, K / 4, 32, 4] and a scale for each
    column (see `linear_int8.cpp`).
    """

    format: str  # "f32", "bf16" or "int8"
    data: Tensor  # flat
    columns: int  # N
    inner: int  # K
    scales: Tensor | None = None

    @classmethod
    def empty(cls, columns: int, inner: int, dtype: torch.dtype) -> PackedWeight:
        """In the format of floats of this dtype."""
        depth = inner + inner % 2 if dtype == torch.bfloat16 else inner
        data = torch.empty(_whole(columns, PANEL) * depth, dtype=dtype)
        return cls(FORMATS[dtype], data, columns, inner)

    @classmethod
    def empty_int8(cls, columns: int, inner: int) -> PackedWeight:
        padded = _whole(columns, PANEL)
        data = torch.empty(padded * _whole(inner, QUAD), dtype=torch.uint8)
        return cls("int8", data, columns, inner, torch.empty(padded))

    def tensors(self) -> tuple[Tensor, ...]:
        """What ops of the library take for this weight."""
        return (self.data,) if self.scales is None else (self.data, self.scales)

    def scratch(self, rows: int) -> Tensor:
        """Memory for the activations of so many rows, quantised: see `QuantisedRows` in `quantise.h`."""
        return torch.empty(rows * (2 + _whole(self.inner, QUAD) // 4))


def _whole(n: int, unit: int) -> int:
    return -(-n // unit) * unit
