"""LoRABatch: which adapter each row of a step goes through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.kernels.ops import Ops
from motet.lora.arena import AdapterArena
from motet.lora.sites import LoRASite


class LoRABatch:
    """The adapters of one step.

    `row_slot` [T] int64 is the truth: the adapter slot of each row, -1 = base. `segments` [n, 3] int64 is derived
    from it: (slot, first row, last row + 1) of each run of rows with one adapter.
    """

    def __init__(self, ops: Ops, arena: AdapterArena, row_slot: Sequence[int] | NDArray[np.int64]) -> None:
        self._ops = ops
        self._arena = arena
        self.row_slot = np.asarray(row_slot, dtype=np.int64)
        self.segments = _runs(self.row_slot)
        acts = arena.acts(self.segments[:, 0])
        self.plan = ops.plan_lora(
            arena.data, arena.table, torch.from_numpy(acts), torch.from_numpy(self.segments)
        )

    def of_rows(self, rows: NDArray[np.int64]) -> LoRABatch:
        """The batch of the rows [R] alone, for what is not computed for every row."""
        return LoRABatch(self._ops, self._arena, self.row_slot[rows])

    def add_delta(self, site: LoRASite, x: Tensor, out: Tensor) -> None:
        """Makes of out[t] what row t's adapter makes of it at `site`, in place (SGMV, arXiv 2310.18547).

        x [T, in_features] is the linear's input, out [T, sum(out_features)] its output, before any epilogue. At an
        embedding x is [T] int64, the ids.
        """
        self._ops.add_lora(x, self._arena.slices(site.index), self.plan, out)


def _runs(row_slot: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n, 3]: (slot, first row, last row + 1) of the longest runs of one adapter."""
    if not len(row_slot):
        return np.empty((0, 3), dtype=np.int64)
    edges = np.flatnonzero(row_slot[1:] != row_slot[:-1])
    runs = np.empty((len(edges) + 1, 3), dtype=np.int64)
    runs[0, 1], runs[-1, 2] = 0, len(row_slot)
    runs[1:, 1] = runs[:-1, 2] = edges + 1
    runs[:, 0] = row_slot[runs[:, 1]]
    return runs[runs[:, 0] >= 0]
