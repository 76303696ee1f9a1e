"""The two ends of a model: `Embedding` (ids -> vectors) and `OutputHead` (vectors -> logits)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from motet.kernels.ops import LinearWeight, Ops
from motet.lora.sites import LoRASite
from motet.runtime.models.base import Weight
from motet.runtime.models.matrix import Matrix

if TYPE_CHECKING:
    from motet.runtime.forward_batch import ForwardBatch


class Embedding:
    """One vector for each token of the vocabulary, plus the rows' adapters. Its table is still empty."""

    def __init__(self, ops: Ops, path: str, vocab_size: int, hidden_size: int, *, site_index: int) -> None:
        """path: the Hugging Face module's."""
        self._ops = ops
        self.path = path
        self.table: LinearWeight = Matrix(ops, hidden_size, [vocab_size])
        """[V, H] D: a `Matrix` until `pack`."""
        self.site = LoRASite(site_index, vocab_size, (path,), (hidden_size,), "embedding")

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, H] A for the batch's input ids, the adapters' deltas added."""
        x = self._ops.embedding(batch.input_ids, self.table)
        if batch.lora is not None:
            batch.lora.add_delta(self.site, batch.input_ids, x)
        return x

    def weights(self) -> dict[str, Weight]:
        """Only until `pack`."""
        (weight,) = self.table.weights
        return {f"{self.path}.weight": weight}

    def pack(self) -> None:
        self.table = self.table.pack(self._ops.pack_table)
        self.site = replace(self.site, weight=partial(self._ops.unpack_linear, self.table))


class OutputHead:
    """Logits of the vocabulary, plus the rows' adapters; tied, the embedding's table serves as the weight.

    An adapter of a tied head leaves the embedding as it is, and the other way round.
    """

    def __init__(self, ops: Ops, path: str, embedding: Embedding, *, tied: bool, site_index: int) -> None:
        self._ops = ops
        self._embedding = embedding
        self._tied = tied
        self._path = path
        vocab_size, hidden_size = embedding.table.shape
        self._weight: LinearWeight = embedding.table if tied else Matrix(ops, hidden_size, [vocab_size])
        self.site = LoRASite(site_index, hidden_size, (path,), (vocab_size,), "head")

    def __call__(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        """x [R, H] A, of `batch.logits_rows` -> [R, V] A, the adapters' deltas added."""
        y = self._ops.linear(x, self._weight)
        if batch.logits_lora is not None:
            batch.logits_lora.add_delta(self.site, x, y)
        return y

    def weights(self) -> dict[str, Weight]:
        """Empty if tied: the embedding's are loaded. Only until `pack`."""
        return {} if self._tied else {f"{self._path}.weight": self._weight.weights[0]}

    def pack(self) -> None:
        """After the embedding's."""
        self._weight = self._embedding.table if self._tied else self._weight.pack(self._ops.pack_linear)
        self.site = replace(self.site, weight=partial(self._ops.unpack_linear, self._weight))
