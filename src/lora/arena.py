"""AdapterArena: the adapters' weights on the device, each at its own size, and where each lies."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.kernels.ops import LoRASlices
from motet.lora.adapter import LoRAWeights
from motet.lora.extents import Extents
from motet.lora.sites import LoRASite

_FIRST_SLOTS = 8
_NOTHING = (0, 0, 0, -1, -1)
"""A column of the table for a projection that the adapter leaves alone."""


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter as its extent holds it, in host memory."""

    layout: Tensor
    """Its part of the arena's table, as if its extent began at 0. [5, projections]"""
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

    Thread-safe: slots are placed and removed on any thread while others compute with `data` and `slices`, as
    long as nobody computes with a slot before `place` has returned it or after `remove` is called with it.
    """

    def __init__(
        self, sites: Sequence[LoRASite], capacity_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity_bytes = capacity_bytes
        # Left uninitialised: the system gives the memory only as adapters fill it.
        self.data = torch.empty(capacity_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._sites = tuple(sites)
        # Of every projection of the model, in the order of the sites: these are the table's columns.
        self._modules = [module for site in self._sites for module in site.modules]
        self._features = [(site.in_features, out) for site in self._sites for out in site.out_features]
        self._lock = threading.Lock()  # over all below
        self._extents = Extents(self.data.numel())
        self._held: dict[int, tuple[int, int]] = {}  # slot -> (offset, size) in elements
        self._free_slots: list[int] = []
        # As in `LoRASlices`: a_offset, b_offset, rank, scale_offset, shift_offset. [5, slots, projections]
        self._table = torch.zeros(len(_NOTHING), 0, len(self._modules), dtype=torch.int64, device=device)
        # Slots whose adapter has a scale or a shift; and of each site, those whose adapter acts there. Readers take
        # no lock: a set is replaced, never changed.
        self._rescaling: frozenset[int] = frozenset()
        self._acting: list[frozenset[int]] = [frozenset()] * len(self._sites)
        self._slices: tuple[LoRASlices, ...] = ()
        self._grow()

    @property
    def used_bytes(self) -> int:
        return self._extents.used * self.data.itemsize

    def slices(self, site_index: int) -> LoRASlices:
        """The tables of one site, with every slot that `place` has returned so far."""
        return self._slices[site_index]

    def rescales(self, slots: Iterable[int]) -> bool:
        """Whether an adapter in one of the slots has a scale or a shift."""
        return not self._rescaling.isdisjoint(slots)

    def adapts(self, slots: Iterable[int], site_index: int) -> bool:
        """Whether an adapter in one of the slots changes anything at the site."""
        return not self._acting[site_index].isdisjoint(slots)

    def nbytes(self, slot: int) -> int:
        """What the adapter in `slot` takes of `capacity_bytes`."""
        return self._held[slot][1] * self.data.itemsize

    def pack(self, weights: LoRAWeights) -> PackedAdapter:
        """`weights` cast to the arena's dtype and laid end to end. On any thread; the arena is not touched."""
        layout, size = self._layout(weights)
        data = torch.empty(size, dtype=self.data.dtype)
        for module, a, b, _, *extras in zip(self._modules, *layout.tolist(), strict=True):
            if module in weights.modules:
                for offset, tensor in zip((a, b, *extras), weights.modules[module], strict=True):
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
            self._table[:, slot] = layout.to(self._table.device)
            if (layout[3:] >= 0).any():
                self._rescaling |= {slot}
            acts = (layout[2] > 0) | (layout[3:] >= 0).any(0)
            per_site = torch.split(acts, [len(site.modules) for site in self._sites])
            self._acting = [
                slots | {slot} if here.any() else slots
                for slots, here in zip(self._acting, per_site, strict=True)
            ]
        # Outside of the lock: nobody else knows the slot yet, so nobody waits and nobody sees it half done.
        self.data[offset : offset + packed.data.numel()].copy_(packed.data)
        return slot

    def copy_out(self, slot: int) -> PackedAdapter:
        """What `place` copied in. The slot stays."""
        with self._lock:
            offset, size = self._held[slot]
            layout = self._table[:, slot].cpu()
        return PackedAdapter(_moved(layout, -offset), self.data[offset : offset + size].cpu().clone())

    def remove(self, slot: int) -> None:
        """Takes the slot and its memory back. No step in flight may use it."""
        with self._lock:
            offset, _ = self._held.pop(slot)
            self._table[:, slot] = self._table.new_tensor(_NOTHING)[:, None]
            self._rescaling -= {slot}
            self._acting = [slots - {slot} for slots in self._acting]
            self._extents.free(offset)
            self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Asserts that free and held memory add up, and that the weights of each slot tile its extent."""
        with self._lock:
            self._extents.check_integrity()
            assert self._extents.used == sum(size for _, size in self._held.values())
            assert sorted([*self._held, *self._free_slots]) == list(range(self._table.shape[1]))
            assert (self._table[:, self._free_slots].cpu() == torch.tensor(_NOTHING)[:, None, None]).all()
            assert self._rescaling == set((self._table[3:] >= 0).any(0).any(1).nonzero().flatten().tolist())
            for slot, (offset, size) in self._held.items():
                end = offset
                rows = zip(*self._table[:, slot].tolist(), self._features, strict=True)
                for a_offset, b_offset, rank, *extras, (in_features, out_features) in rows:
                    if rank:
                        assert (a_offset, b_offset) == (end, end + rank * in_features)
                        end = b_offset + rank * out_features
                    for extra in extras:
                        assert extra in (-1, end)
                        end += out_features if extra >= 0 else 0
                assert end == offset + size

    def _layout(self, weights: LoRAWeights) -> tuple[Tensor, int]:
        """The slot's part of the table if its extent began at 0 [5, projections], and the extent's size."""
        assert weights.modules.keys() <= set(self._modules)
        layout = torch.tensor(_NOTHING)[:, None].repeat(1, len(self._modules))
        end = 0
        for column, (module, features) in enumerate(zip(self._modules, self._features, strict=True)):
            if module in weights.modules:
                a, b, *extras = weights.modules[module]
                rank = len(a)
                assert (a.shape[1], b.shape[0], b.shape[1]) == (*features, rank)
                layout[:3, column] = torch.tensor([end, end + a.numel(), rank])
                end += a.numel() + b.numel()
                for row, extra in enumerate(extras, 3):
                    if extra is not None:
                        assert extra.shape == (features[1],)
                        layout[row, column] = end
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
        """Twice as many slots in a new table. Who still reads the old one finds all that it knows there."""
        before = self._table.shape[1]
        slots = 2 * before or _FIRST_SLOTS
        table = self._table.new_tensor(_NOTHING)[:, None, None].repeat(1, slots, len(self._modules))
        table[:, :before] = self._table
        self._table = table
        self._free_slots.extend(reversed(range(before, table.shape[1])))
        slices = []
        first = 0
        for site in self._sites:
            a_offset, b_offset, rank, scale_offset, shift_offset = table[
                :, :, first : first + len(site.modules)
            ]
            ends = [sum(site.out_features[: i + 1]) for i in range(len(site.modules))]
            columns = tuple(zip([0, *ends[:-1]], ends, strict=True))
            slices.append(LoRASlices(a_offset, b_offset, rank, scale_offset, shift_offset, columns))
            first += len(site.modules)
        self._slices = tuple(slices)  # readers take no lock: one assignment shows all of it


def _moved(layout: Tensor, by: int) -> Tensor:
    """An adapter's part of the table with its extent moved."""
    layout = layout.clone()
    layout[:2] += by
    layout[3:] += by * (layout[3:] >= 0)
    return layout
