"""Matrix: a linear's weight, or a table, from when its shape is known until the backend has packed it."""

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

PIECE = 1 << 15
"""Numbers that torch copies on the calling thread. Threads of its own would spin beside those that pack."""


class Matrix:
    """The weights of one or more projections under each other, [sum(out_features), in_features] D.

    They stay in the checkpoint until `pack`: then one matrix after another passes through memory that is still warm
    from the one before, and never are there two copies of a model.
    """

    def __init__(self, ops: Ops, in_features: int, out_features: Sequence[int]) -> None:
        self._ops = ops
        self._values = torch.empty(sum(out_features), in_features, dtype=ops.dtype, device="meta")
        self._sources: list[StoredTensor | Tensor | None] = [None] * len(out_features)
        self._parts = torch.split(self._values, list(out_features))
        self.weights: Sequence[Weight] = [_Rows(p, self._sources, i) for i, p in enumerate(self._parts)]
        """Where each projection's weight goes."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._values.shape
        return rows, columns

    def pack(self, pack_values: Callable[..., LinearWeight]) -> LinearWeight:
        """As the backend likes it: the checkpoint's own blocks if all came in these and it can, else the values."""
        return self._ops.packed(self.shape, lambda: self._pack(pack_values))

    def _pack(self, pack_values: Callable[..., LinearWeight]) -> LinearWeight:
        stored = [source for source in self._sources if isinstance(source, StoredTensor)]
        if self._ops.keeps_blocks:
            blocks = [source.blocks() for source in stored if source.blocks is not None]
            if len(blocks) == len(self._sources) and (packed := self._ops.pack_blocks(blocks)) is not None:
                return packed
            for source in stored:
                if source.blocks is not None:
                    logger.info("a matrix in %s becomes %s", source.dtype, self._ops.dtype)
        if all(source.blocks is None for source in stored):
            weights = [_values(source) for source in self._sources]
            if self._ops.packs(weights):
                return pack_values(*weights)
        values = torch.empty(self.shape, dtype=self._ops.dtype, device=self._ops.device)
        rows = torch.split(values, [len(part) for part in self._parts])
        for filling, target in zip(self._sources, rows, strict=True):
            self._write(filling, target)
        return pack_values(values)

    def _write(self, source: StoredTensor | Tensor | None, target: Tensor) -> None:
        blocks = source.blocks if isinstance(source, StoredTensor) else None
        if blocks is not None and self._ops.expand_blocks(blocks(), target):
            return
        pieces = (torch.split(tensor.reshape(-1), PIECE) for tensor in (target, _values(source)))
        for to, piece in zip(*pieces, strict=True):
            to.copy_(piece)


def _values(source: StoredTensor | Tensor | None) -> Tensor:
    assert source is not None, "packed before all was loaded"
    return source if isinstance(source, Tensor) else source.read()


@dataclass(frozen=True)
class _Rows(Weight):
    """One projection's. The target has no memory, only a shape."""

    sources: list[StoredTensor | Tensor | None]
    index: int

    def load(self, tensor: Tensor) -> None:
        self.sources[self.index] = tensor

    def take(self, stored: StoredTensor) -> None:
        self.sources[self.index] = stored
