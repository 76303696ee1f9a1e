"""RecordedSteps: the model's forward pass, replayed where that is much shorter than calling op after op."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from motet.kernels.ops import KVCache, Ops, Replay
from motet.runtime.forward_batch import ForwardBatch
from motet.runtime.models.base import CausalLM

Shape = tuple[int, int, bool]
"""(T, rows with logits, whether rows have adapters): what a step's calls depend on."""

MAX_ROWS = 64
"""Steps of more rows run op by op: what lies between ops is little beside them."""


class RecordedSteps:
    """Runs a model's steps, those of few rows by replay.

    A shape is recorded when it comes for the second time; many never do. Steps with part of a prompt in them run op
    by op: their shapes are too many to keep, and seldom come again.
    """

    def __init__(self, ops: Ops, model: CausalLM, kv_caches: Sequence[KVCache]) -> None:
        self._ops = ops
        self._model = model
        self._kv_caches = kv_caches
        self._seen: set[Shape] = set()
        self._replays: dict[Shape, Replay | None] = {}

    def replays(self, batch: ForwardBatch) -> bool:
        """Whether the batch's step is a recorded one."""
        return self._replays.get(_shape(batch)) is not None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, V] float32, valid until the next step."""
        rows = len(batch.input_ids)
        if rows > MAX_ROWS or len(batch.logits_rows) != rows:
            return self._forward(batch)
        shape = _shape(batch)
        if shape not in self._seen:
            self._seen.add(shape)
            return self._forward(batch)
        if shape not in self._replays:
            self._replays[shape] = self._ops.record(lambda: self._forward(batch), batch.arrays(self._ops))
        replay = self._replays[shape]
        return self._forward(batch) if replay is None else replay(batch.arrays(self._ops))

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self._model.forward(batch, self._kv_caches)


def _shape(batch: ForwardBatch) -> Shape:
    return len(batch.input_ids), len(batch.logits_rows), batch.lora is not None
