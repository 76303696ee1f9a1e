"""Packed weights: a linear's [N, K] as the native library reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motet.kernels.cpu.memory import HugePages
from motet.kernels.ops import BLOCK, Blocks

PANEL = 32
"""Columns (of the linear's output) that lie together, as in `panels.h`."""

PAIR = 2
"""Of bf16 along K that lie together."""

QUAD = 4
"""Bytes along K that are multiplied at once, as in `quantise.h`."""

INT8_GROUP = 64
"""K whose activations share a scale where they meet int8 weights."""

INT4_GROUP = 32
"""K whose weights share a scale and a minimum in int4, and whose activations share a scale."""

FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""How ops of the library end their names, by the dtype that they are compiled for."""


@dataclass(frozen=True)
class PackedWeight:
    """Panels of 32 columns; what lacks to whole panels, pairs, quads and groups weighs nothing.

    Float32 as [N / 32, K, 32], bf16 as [N / 32, K / 2, 32, 2], int8 as [N / 32, K / 4, 32, 4] and a scale for each
    column or ("int8_grouped") for each column's group, int4 as groups with their scales and minima (see `layouts.h`).
    """

    format: str  # "f32", "bf16", "int8", "int8_grouped" or "int4"
    data: Tensor  # flat
    columns: int  # N
    inner: int  # K
    scales: Tensor | None = None
    """int8: [N] float32, up to whole panels. int8_grouped: [N / 32, K / group, 32] float16."""
    group: int = 0
    """Of K, with a scale of their own: activations that meet quantised weights, weights in int8_grouped and int4."""

    @classmethod
    def empty(cls, columns: int, inner: int, dtype: torch.dtype, memory: HugePages) -> PackedWeight:
        """In the format of floats of this dtype."""
        depth = _whole(inner, PAIR) if dtype == torch.bfloat16 else inner
        data = memory.empty(_whole(columns, PANEL) * depth, dtype)
        return cls(FORMATS[dtype], data, columns, inner)

    @classmethod
    def empty_int8(cls, columns: int, inner: int, group: int, memory: HugePages) -> PackedWeight:
        padded = _whole(columns, PANEL)
        data = memory.empty(padded * _whole(inner, QUAD), torch.uint8)
        return cls("int8", data, columns, inner, memory.empty(padded, torch.float32), group)

    @classmethod
    def empty_int8_grouped(cls, columns: int, inner: int, group: int, memory: HugePages) -> PackedWeight:
        padded = _whole(columns, PANEL)
        data = memory.empty(padded * _whole(inner, QUAD), torch.uint8)
        scales = memory.empty(padded * -(-inner // group), torch.float16)
        return cls("int8_grouped", data, columns, inner, scales, group)

    @classmethod
    def empty_int4(cls, columns: int, inner: int, group: int, memory: HugePages) -> PackedWeight:
        bytes_per_column = 4 + group // 2
        data = memory.empty(_whole(columns, PANEL) * -(-inner // group) * bytes_per_column, torch.uint8)
        return cls("int4", data, columns, inner, group=group)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return (self.data,) if self.scales is None else (self.data, self.scales)

    @property
    def grouping(self) -> tuple[int, ...]:
        """What ops on the weights alone are told of their groups, where they have some."""
        return (self.group,) if self.format in ("int8_grouped", "int4") else ()

    def scratch(self, rows: int) -> Tensor:
        """Memory for the activations of so many rows: as bf16, or quantised (see `QuantisedRows` in `quantise.h`)."""
        if self.format == "bf16":
            return torch.empty(rows, _whole(self.inner, PAIR), dtype=torch.bfloat16)
        groups = -(-self.inner // self.group)
        return torch.empty(rows * groups * (2 + self.group // 4))


def fits_int4(blocks: Blocks) -> bool:
    """Whether the minima, of Q4_0 -8 times the scales, are in the range of half precision."""
    if blocks.kind != "Q4_0":
        return True
    scales = blocks.rows.view(len(blocks.rows), blocks.inner // BLOCK, -1)[..., :2].view(torch.float16)
    return not bool((scales.abs() > torch.finfo(torch.float16).max / 8).any())


def _whole(n: int, unit: int) -> int:
    return -(-n // unit) * unit
