"""Packed weights: a linear's [N, K] as the native library reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motet.kernels.cpu.memory import HugePages
from motet.kernels.ops import BLOCK, Blocks

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
    """Panels of P columns; what lacks to whole panels, pairs, quads and groups weighs nothing.

    Float32 as [N / P, K, P], bf16 as [N / P, K / 2, P, 2], int8 as [N / P, K / 4, P, 4] and a scale for each column or
    ("int8_grouped") for each column's group, int4 as groups with their scales and minima (see `layouts.h`).
    """

    format: str  # "f32", "bf16", "int8", "int8_grouped" or "int4"
    data: Tensor  # flat
    columns: int  # N
    inner: int  # K
    scales: Tensor | None = None
    """int8: [N] float32, up to whole panels. int8_grouped: [N / P, K / group, P] float16."""
    group: int = 0
    """Of K, with a scale of their own: activations that meet quantised weights, weights in int8_grouped and int4."""

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


@dataclass(frozen=True)
class Panels:
    """Makes room for weights as a build of the library reads them: in panels of so many `columns`, as in `panels.h`."""

    columns: int
    memory: HugePages

    def floats(self, columns: int, inner: int, dtype: torch.dtype) -> PackedWeight:
        depth = _whole(inner, PAIR) if dtype == torch.bfloat16 else inner
        data = self.memory.empty(self._whole(columns) * depth, dtype)
        return PackedWeight(FORMATS[dtype], data, columns, inner)

    def int8(self, columns: int, inner: int, group: int) -> PackedWeight:
        padded = self._whole(columns)
        data = self.memory.empty(padded * _whole(inner, QUAD), torch.uint8)
        scales = self.memory.empty(padded, torch.float32)
        return PackedWeight("int8", data, columns, inner, scales, group)

    def int8_grouped(self, columns: int, inner: int, group: int) -> PackedWeight:
        padded = self._whole(columns)
        data = self.memory.empty(padded * _whole(inner, QUAD), torch.uint8)
        scales = self.memory.empty(padded * -(-inner // group), torch.float16)
        return PackedWeight("int8_grouped", data, columns, inner, scales, group)

    def int4(self, columns: int, inner: int, group: int) -> PackedWeight:
        bytes_per_column = 4 + group // 2
        data = self.memory.empty(self._whole(columns) * -(-inner // group) * bytes_per_column, torch.uint8)
        return PackedWeight("int4", data, columns, inner, group=group)

    def memory_from(self, column: int, weight: PackedWeight) -> tuple[Tensor, ...]:
        """A weight's memory from a column on that begins a panel."""
        padded = self._whole(weight.columns)
        return tuple(tensor[column * len(tensor) // padded :] for tensor in weight.memory)

    def _whole(self, columns: int) -> int:
        return _whole(columns, self.columns)


def fits_int4(blocks: Blocks) -> bool:
    """Whether the minima, of Q4_0 -8 times the scales, are in the range of half precision."""
    if blocks.kind != "Q4_0":
        return True
    scales = blocks.rows.view(len(blocks.rows), blocks.inner // BLOCK, -1)[..., :2].view(torch.float16)
    return not bool((scales.abs() > torch.finfo(torch.float16).max / 8).any())


def _whole(n: int, unit: int) -> int:
    return -(-n // unit) * unit
