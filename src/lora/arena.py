"""AdapterArena: the adapters' weights on the device, each at its own size, and where each lies."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.kernels.ops import LoRASlices
from motet.lora.adapter import LoRAWeights
from motet.lora.extents import Extents
from motet.lora.sites import LoRASite

_FIRST_SLOTS = 8
_NOTHING = (0, 0, 0, -1, -1)
"""The table's entry for a projection that the adapter leaves alone."""


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter as its extent holds it, in host memory."""

    layout: Tensor
    """Its part of the arena's table, as if its extent began at 0. [projections, 5]"""
    data: Tensor
    """[size], in the arena's dtype, on the CPU."""

    @property
    def nbytes(self) -> int:
        """What it takes of an arena."""
        return self.data.nbytes


class AdapterArena:
    """One flat tensor that holds every resident adapter: of each adapted projection A, B, scale and shift (those
    that there are), end to end.

    No adapter is padded to the rank of another. An adapter lies in one extent, so an arena in use can have
    more bytes free in all than the largest adapter that it still takes.

    Thread-safe: slots are placed and removed on any thread while others compute with `data` and `table`, as
    long as nobody computes with a slot before `place` has returned it or after `remove` is called with it.
    """

    def __init__(self, sites: Sequence[LoRASite], memory: Tensor) -> None:
        """memory: flat, of any content, as `Ops.new_adapter_memory` makes it."""
        self.data = memory
        self._sites = tuple(sites)
        # Of every projection of the model, in the order of the sites, as they stand in the table.
        self._modules = [module for site in self._sites for module in site.modules]
        self._features = [(site.in_features, out) for site in self._sites for out in site.out_features]
        self._lock = threading.Lock()  # over all below
        self._extents = Extents(self.data.numel())
        self._held: dict[int, tuple[int, int]] = {}  # slot -> (offset, size) in elements
        self._free_slots: list[int] = []
        # Readers take no lock: a longer table replaces the old one, and what both say of a slot stands until its end.
        shape = (0, len(self._modules), len(_NOTHING))
        self._table = torch.zeros(shape, dtype=torch.int64, device=memory.device)
        self._acts = np.zeros((0, len(self._sites)), dtype=np.bool_)  # [slots, sites]
        self._grow()
        self._slices = tuple(_slices_of(self._sites))

    @property
    def capacity_bytes(self) -> int:
        return self.data.nbytes

    @property
    def used_bytes(self) -> int:
        return self._extents.used * self.data.itemsize

    def slices(self, site_index: int) -> LoRASlices:
        """Where the site's projections stand in `table` and in the linear's output."""
        return self._slices[site_index]

    @property
    def table(self) -> Tensor:
        """As `Ops.plan_lora` takes it, with every slot that `place` has returned so far."""
        return self._table

    def acts(self, slots: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of each site: whether an adapter in one of the slots changes anything there. [sites]"""
        acts: NDArray[np.bool_] = np.logical_or.reduce(self._acts[slots], axis=0)
        return acts

    def nbytes(self, slot: int) -> int:
        """What the adapter in `slot` takes of `capacity_bytes`."""
        return self._held[slot][1] * self.data.itemsize

    def pack(self, weights: LoRAWeights) -> PackedAdapter:
        """`weights` cast to the arena's dtype and laid end to end. On any thread; the arena is not touched."""
        layout, size = self._layout(weights)
        data = torch.empty(size, dtype=self.data.dtype)
        for module, (a, b, _, *extras) in zip(self._modules, layout.tolist(), strict=True):
            if module in weights.modules:
                lora = weights.modules[module]
                for offset, tensor in zip((a, b, *extras), lora._replace(b=lora.b.t()), strict=True):
                    if tensor is not None:
                        data[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        return PackedAdapter(layout, data)

    def fits(self, nbytes: int, without: Collection[int] = ()) -> bool:
        """Whether an adapter of `nbytes` > 0 would have room if the slots `without` were removed."""
        with self._lock:
            freed = [self._held[slot][0] for slot in without]
            return self._extents.fits(nbytes // self.data.itemsize, freed)

    def place(self, packed: PackedAdapter) -> int:
        """Copies an adapter in and returns its adapter slot. Only if it fits, as `fits` says."""
        with self._lock:
            slot, offset = self._reserve(packed.data.numel())
            layout = _moved(packed.layout, offset)
            self._table[slot] = layout.to(self._table.device)
            acts = (layout[:, 2] > 0) | (layout[:, 3:] >= 0).any(1)
            self._acts[slot] = np.logical_or.reduceat(acts.numpy(), [s.first for s in self._slices])
        # Outside of the lock: nobody else knows the slot yet, so nobody waits and nobody sees it half done.
        self.data[offset : offset + packed.data.numel()].copy_(packed.data)
        return slot

    def copy_out(self, slot: int) -> PackedAdapter:
        """What `place` copied in. The slot stays."""
        with self._lock:
            offset, size = self._held[slot]
            layout = self._table[slot].cpu()
        return PackedAdapter(_moved(layout, -offset), self.data[offset : offset + size].cpu().clone())

    def remove(self, slot: int) -> None:
        """Takes the slot and its memory back. No step in flight may use it."""
        with self._lock:
            offset, _ = self._held.pop(slot)
            self._table[slot] = self._table.new_tensor(_NOTHING)
            self._acts[slot] = False
            self._extents.free(offset)
            self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Asserts that free and held memory add up, and that the weights of each slot tile its extent."""
        with self._lock:
            self._extents.check_integrity()
            assert self._extents.used == sum(size for _, size in self._held.values())
            assert sorted([*self._held, *self._free_slots]) == list(range(len(self._table)))
            assert (self._table[self._free_slots].cpu() == torch.tensor(_NOTHING)).all()
            assert not self._acts[self._free_slots].any()
            for slot, (offset, size) in self._held.items():
                end = offset
                rows = zip(self._table[slot].tolist(), self._features, strict=True)
                for (a_offset, b_offset, rank, *extras), (in_features, out_features) in rows:
                    if rank:
                        assert (a_offset, b_offset) == (end, end + rank * in_features)
                        end = b_offset + rank * out_features
                    for extra in extras:
                        assert extra in (-1, end)
                        end += out_features if extra >= 0 else 0
                assert end == offset + size

    def _layout(self, weights: LoRAWeights) -> tuple[Tensor, int]:
        """The slot's part of the table if its extent began at 0 [projections, 5], and the extent's size."""
        assert weights.modules.keys() <= set(self._modules)
        layout = torch.tensor(_NOTHING).repeat(len(self._modules), 1)
        end = 0
        for place, (module, features) in enumerate(zip(self._modules, self._features, strict=True)):
            if module in weights.modules:
                a, b, *extras = weights.modules[module]
                rank = len(a)
                assert (a.shape[1], b.shape[0], b.shape[1]) == (*features, rank)
                layout[place, :3] = torch.tensor([end, end + a.numel(), rank])
                end += a.numel() + b.numel()
                for which, extra in enumerate(extras, 3):
                    if extra is not None:
                        assert extra.shape == (features[1],)
                        layout[place, which] = end
                        end += extra.numel()
        return layout, end

    def _reserve(self, size: int) -> tuple[int, int]:
        """(slot, offset) of a new extent."""
        offset = self._extents.alloc(size)
        assert offset is not None, "an adapter is placed where it does not fit"
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._held[slot] = (offset, size)
        return slot, offset

    def _grow(self) -> None:
        """Twice as many slots in new tables. Who still reads the old ones finds all that it knows there."""
        before = len(self._table)
        slots = 2 * before or _FIRST_SLOTS
        table = self._table.new_tensor(_NOTHING).repeat(slots, len(self._modules), 1)
        table[:before] = self._table
        acts = np.zeros((slots, len(self._sites)), dtype=np.bool_)
        acts[:before] = self._acts
        self._table, self._acts = table, acts
        self._free_slots.extend(reversed(range(before, slots)))


def _slices_of(sites: Sequence[LoRASite]) -> Iterator[LoRASlices]:
    first = 0
    for site in sites:
        bounds = torch.tensor([0, *accumulate(site.out_features)])
        yield LoRASlices(site.index, first, site.in_features, bounds)
        first += len(site.modules)


def _moved(layout: Tensor, by: int) -> Tensor:
    """An adapter's part of the table with its extent moved."""
    layout = layout.clone()
    layout[:, :2] += by
    layout[:, 3:] += by * (layout[:, 3:] >= 0)
    return layout
