"""RecordedSteps: the model's forward pass, recorded for the shapes that come again and again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from motet.kernels.ops import Ops, Replay
from motet.runtime.forward_batch import ForwardBatch

Shape = tuple[int, int, bool]
"""(T, rows of logits, whether rows have adapters): what the calls of a step depend on."""


class RecordedSteps:
    """Runs steps, and replays those of few rows, whose ops are short beside what lies between them.

    A shape is recorded when it comes for the second time: most prompts' last chunks never do.
    """

    def __init__(self, ops: Ops, forward: Callable[[ForwardBatch], Tensor], *, max_rows: int) -> None:
        """max_rows: steps of more than so many rows always run op by op."""
        self._ops = ops
        self._forward = forward
        self._max_rows = max_rows
        self._seen: set[Shape] = set()
        self._replays: dict[Shape, Replay | None] = {}

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, V] float32 of the batch, valid until the next step."""
        shape = (len(batch.input_ids), len(batch.logits_rows), batch.lora is not None)
        if shape[0] > self._max_rows:
            return self._forward(batch)
        if shape not in self._seen:
            self._seen.add(shape)
            return self._forward(batch)
        if shape not in self._replays:
            self._replays[shape] = self._ops.record(lambda: self._forward(batch), batch.inputs)
        replay = self._replays[shape]
        return self._forward(batch) if replay is None else replay(batch.inputs)
