"""AdapterArena: the adapters' weights on the device, each at its own size, and where each lies."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.errors import AdapterLoadError
from motet.kernels.ops import LoRASlices
from motet.lora.adapter import LoRAWeights
from motet.lora.extents import Extents
from motet.lora.sites import LoRASite

_FIRST_SLOTS = 8


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter as its extent holds it, in host memory."""

    layout: Tensor
    """Its part of the arena's table, as if its extent began at 0. [3, projections]"""
    data: Tensor
    """[size], in the arena's dtype, on the CPU."""

    @property
    def nbytes(self) -> int:
        """What it takes of an arena."""
        return self.data.nbytes


class AdapterArena:
    """One flat tensor that holds every resident adapter: A and B of each adapted projection, end to end.

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
        # a_offset, b_offset, rank of each slot and projection; rank 0: not adapted. [3, slots, projections]
        self._table = torch.zeros(3, 0, len(self._modules), dtype=torch.int64, device=device)
        self._slices: tuple[LoRASlices, ...] = ()
        self._grow()

    @property
    def used_bytes(self) -> int:
        return self._extents.used * self.data.itemsize

    def slices(self, site_index: int) -> LoRASlices:
        """The tables of one site, with every slot that `place` has returned so far."""
        return self._slices[site_index]

    def nbytes(self, slot: int) -> int:
        """What the adapter in `slot` takes of `capacity_bytes`."""
        return self._held[slot][1] * self.data.itemsize

    def pack(self, weights: LoRAWeights) -> PackedAdapter:
        """`weights` cast to the arena's dtype and laid end to end. On any thread; the arena is not touched."""
        layout, size = self._layout(weights)
        data = torch.empty(size, dtype=self.data.dtype)
        for module, a_offset, b_offset, _ in zip(self._modules, *layout.tolist(), strict=True):
            if module in weights.modules:
                for offset, tensor in zip((a_offset, b_offset), weights.modules[module], strict=True):
                    data[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        return PackedAdapter(layout, data)

    def fits(self, nbytes: int, without: Collection[int] = ()) -> bool:
        """Whether an adapter of `nbytes` > 0 would have room if the slots `without` were removed."""
        with self._lock:
            freed = [self._held[slot][0] for slot in without]
            return self._extents.fits(nbytes // self.data.itemsize, freed)

    def place(self, adapter: LoRAWeights | PackedAdapter) -> int:
        """Copies an adapter in and returns its adapter slot. Raises `AdapterLoadError` if there is no room."""
        packed = adapter if isinstance(adapter, PackedAdapter) else self.pack(adapter)
        with self._lock:
            slot, offset = self._reserve(packed.data.numel())
            layout = packed.layout.to(self._table.device, copy=True)
            layout[:2] += offset
            self._table[:, slot] = layout
        # Outside of the lock: nobody else knows the slot yet, so nobody waits and nobody sees it half done.
        self.data[offset : offset + packed.data.numel()].copy_(packed.data)
        return slot

    def copy_out(self, slot: int) -> PackedAdapter:
        """What `place` copied in. The slot stays."""
        with self._lock:
            offset, size = self._held[slot]
            layout = self._table[:, slot].cpu().clone()
        layout[:2] -= offset
        return PackedAdapter(layout, self.data[offset : offset + size].cpu().clone())

    def remove(self, slot: int) -> None:
        """Takes the slot and its memory back. No step in flight may use it."""
        with self._lock:
            offset, _ = self._held.pop(slot)
            self._table[:, slot] = 0
            self._extents.free(offset)
            self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Asserts that free and held memory add up, and that the weights of each slot tile its extent."""
        with self._lock:
            self._extents.check_integrity()
            assert self._extents.used == sum(size for _, size in self._held.values())
            assert sorted([*self._held, *self._free_slots]) == list(range(self._table.shape[1]))
            assert not self._table[:, self._free_slots].any()
            for slot, (offset, size) in self._held.items():
                end = offset
                rows = zip(*self._table[:, slot].tolist(), self._features, strict=True)
                for a_offset, b_offset, rank, (in_features, out_features) in rows:
                    if rank:
                        assert (a_offset, b_offset) == (end, end + rank * in_features)
                        end = b_offset + rank * out_features
                assert end == offset + size

    def _layout(self, weights: LoRAWeights) -> tuple[Tensor, int]:
        """The slot's part of the table if its extent began at 0 [3, projections], and the extent's size."""
        assert weights.modules.keys() <= set(self._modules)
        layout = torch.zeros(3, len(self._modules), dtype=torch.int64)
        end = 0
        for column, (module, features) in enumerate(zip(self._modules, self._features, strict=True)):
            if module in weights.modules:
                a, b = weights.modules[module]
                rank = len(a)
                assert (a.shape[1], b.shape[0], b.shape[1]) == (*features, rank)
                layout[:, column] = torch.tensor([end, end + a.numel(), rank])
                end += a.numel() + b.numel()
        return layout, end

    def _reserve(self, size: int) -> tuple[int, int]:
        """(slot, offset) of a new extent."""
        offset = self._extents.alloc(size)
        if offset is None:
            itemsize = self.data.itemsize
            raise AdapterLoadError(
                f"no room: the adapter takes {size * itemsize} bytes in one piece. Of adapter_bytes = "
                f"{self.capacity_bytes}, {self.capacity_bytes - self.used_bytes} are free, at most "
                f"{self._extents.largest_free * itemsize} in one piece. Raise EngineConfig.adapter_bytes, or "
                "unload adapters (one that running requests use stays until they end)"
            )
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._held[slot] = (offset, size)
        return slot, offset

    def _grow(self) -> None:
        """Twice as many slots in a new table. Who still reads the old one finds all that it knows there."""
        before = self._table.shape[1]
        table = self._table.new_zeros(3, 2 * before or _FIRST_SLOTS, len(self._modules))
        table[:, :before] = self._table
        self._table = table
        self._free_slots.extend(reversed(range(before, table.shape[1])))
        slices = []
        first = 0
        for site in self._sites:
            a_offset, b_offset, rank = table[:, :, first : first + len(site.modules)]
            ends = [sum(site.out_features[: i + 1]) for i in range(len(site.modules))]
            columns = tuple(zip([0, *ends[:-1]], ends, strict=True))
            slices.append(LoRASlices(a_offset, b_offset, rank, columns))
            first += len(site.modules)
        self._slices = tuple(slices)  # readers take no lock: one assignment shows all of it
