"""Matrix: a weight from the moment its memory is there until the backend has packed it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.kernels.ops import LinearWeight, Ops
from motet.runtime.models.base import Weight
from motet.runtime.models.checkpoint import StoredTensor

logger = logging.getLogger("motet")


class Matrix:
    """The weights of one or more projections under each other, [sum(out_features), in_features] D, still empty."""

    def __init__(self, ops: Ops, in_features: int, out_features: Sequence[int]) -> None:
        self._ops = ops
        self.values = torch.empty(sum(out_features), in_features, dtype=ops.dtype, device=ops.device)
        """Takes memory from the system only as it is written to: what stays in blocks takes none."""
        kept: list[StoredTensor | None] = [None] * len(out_features)
        parts = torch.split(self.values, list(out_features))
        self.weights: Sequence[Weight] = [_Rows(part, ops, kept, i) for i, part in enumerate(parts)]
        """Where each projection's weight goes."""
        self._kept = kept

    def pack(self, pack_values: Callable[[Tensor], LinearWeight]) -> LinearWeight:
        """As the backend likes it: the checkpoint's own blocks if all came in these and it can, else the values."""
        blocks = [
            stored.blocks() for stored in self._kept if stored is not None and stored.blocks is not None
        ]
        if len(blocks) == len(self._kept) and (packed := self._ops.pack_blocks(blocks)) is not None:
            return packed
        for weight, stored in zip(self.weights, self._kept, strict=True):
            if stored is not None:
                logger.info("a matrix in %s becomes %s", stored.dtype, self._ops.dtype)
                weight.load(stored.read())
        return pack_values(self.values)


@dataclass(frozen=True)
class _Rows(Weight):
    """One projection's."""

    ops: Ops
    kept: list[StoredTensor | None]
    """Of all projections: what to pack in its own blocks."""
    index: int

    def take(self, stored: StoredTensor) -> None:
        if self.ops.keeps_blocks and stored.blocks is not None:
            self.kept[self.index] = stored
        elif stored.blocks is None or not self.ops.expand_blocks(stored.blocks(), self.target):
            self.load(stored.read())
