"""LoRABatch: which adapter each row of a step goes through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.kernels.ops import Ops
from motet.lora.arena import AdapterArena
from motet.lora.sites import LoRASite


class LoRABatch:
    """The adapters of one step.

    `row_slot` [T] int64 is the truth: the adapter slot of each row, -1 = base. `segments` [n, 3] int64 on the
    CPU is derived from it: (slot, first row, last row + 1) of each run of rows with one adapter.
    """

    def __init__(self, arena: AdapterArena, row_slot: Sequence[int] | Tensor) -> None:
        self._arena = arena
        self.row_slot = torch.as_tensor(row_slot, dtype=torch.int64)
        slots, lengths = torch.unique_consecutive(self.row_slot.cpu(), return_counts=True)
        ends = lengths.cumsum(0)
        self.segments = torch.stack((slots, ends - lengths, ends), dim=1)[slots >= 0]
        self._slots = self.segments[:, 0].tolist()
        self._rescales = arena.rescales(self._slots)

    def adapts(self, site: LoRASite) -> bool:
        """Whether any row's adapter acts at `site`."""
        return self._arena.adapts(self._slots, site.index)

    def of_rows(self, rows: Tensor) -> LoRABatch:
        """The batch of the rows [R] int64 alone, for what is not computed for every row."""
        return LoRABatch(self._arena, self.row_slot[rows])

    def add_delta(self, ops: Ops, site: LoRASite, x: Tensor, out: Tensor) -> None:
        """Makes of out[t] what row t's adapter makes of it at `site`, in place (SGMV, arXiv 2310.18547).

        x [T, in_features] is the linear's input, out [T, sum(out_features)] its output, before any epilogue. At an
        embedding x is [T] int64, the ids.
        """
        if self.adapts(site):
            arena, slices = self._arena.data, self._arena.slices(site.index)
            if self._rescales:
                ops.lora_rescale(arena, slices, self.segments, out)
            if site.role == "embedding":
                h = ops.lora_shrink_ids(x, site.in_features, arena, slices, self.segments)
            else:
                h = ops.lora_shrink(x, arena, slices, self.segments)
            ops.lora_expand(h, arena, slices, self.segments, out)
