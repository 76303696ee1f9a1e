"""Small sites and weights for the tests of arena, batch and pool."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch

from motet.errors import AdapterLoadError
from motet.lora.adapter import LoRAWeights, ModuleLoRA
from motet.lora.arena import AdapterArena
from motet.lora.generation import AdapterInfo, Bring, Generation, Read
from motet.lora.pool import AdapterPool
from motet.lora.sites import LoRASite

SITES = (
    LoRASite(0, 3, ("q", "k", "v"), (4, 2, 2)),
    LoRASite(1, 5, ("o",), (3,)),
)
FEATURES = {m: (s.in_features, n) for s in SITES for m, n in zip(s.modules, s.out_features, strict=True)}
MODULES = tuple(FEATURES)
_digests = itertools.count(1)


def make_weights(
    ranks: Mapping[str, int],
    *,
    value: float | None = None,
    scaled: Collection[str] = (),
    shifted: Collection[str] = (),
) -> LoRAWeights:
    """Weights of the given ranks, random or all A and B equal to `value`; each call has a digest of its own."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape) if value is None else torch.full(shape, value)

    modules = {
        m: ModuleLoRA(
            tensor(r, FEATURES[m][0]),
            tensor(FEATURES[m][1], r),
            tensor(FEATURES[m][1]) if m in scaled else None,
            tensor(FEATURES[m][1]) if m in shifted else None,
        )
        for m, r in ranks.items()
    }
    return LoRAWeights(next(_digests).to_bytes(32, "big"), modules)


def num_bytes(weights: LoRAWeights) -> int:
    """In float32."""
    return sum(tensor.nbytes for module in weights.modules.values() for tensor in module.tensors())


def make_arena(capacity_bytes: int = 1 << 16) -> AdapterArena:
    """Float32 on the CPU, full of NaN: whoever reads what nobody wrote shows it."""
    return AdapterArena(SITES, torch.full((capacity_bytes // 4,), float("nan")))


def weights_in(arena: AdapterArena, slot: int) -> dict[str, ModuleLoRA]:
    """What an op finds in the slot."""
    found = {}
    for module, (k, n), entry in zip(MODULES, FEATURES.values(), arena.table[slot].tolist(), strict=True):
        a, b, r, *extras = entry
        scale, shift = (None if at < 0 else arena.data[at : at + n] for at in extras)
        if r or shift is not None:
            lora = arena.data[a : a + r * k].view(r, k), arena.data[b : b + r * n].view(r, n).t()
            found[module] = ModuleLoRA(*lora, scale, shift)
    return found


def holds(arena: AdapterArena, slot: int, weights: LoRAWeights) -> bool:
    found = weights_in(arena, slot)
    return found.keys() == weights.modules.keys() and all(
        y is None if x is None else torch.equal(x, y)
        for m in found
        for x, y in zip(found[m], weights.modules[m], strict=True)
    )


class Disk:
    """An arena, its pool, and a loader that does a pool's jobs one by one, from folders in a dictionary."""

    def __init__(
        self, capacity_bytes: int = 1 << 16, host_bytes: int = 1 << 16, *, resolving: bool = False
    ) -> None:
        self.arena = make_arena(capacity_bytes)
        self.pool = AdapterPool(self.arena, host_bytes, resolving=resolving)
        self.folders: dict[Path, LoRAWeights] = {}
        self.num_reads = 0

    def save(self, name: str, weights: LoRAWeights) -> Path:
        self.folders[Path(name)] = weights
        return Path(name)

    def ask(
        self, name: str, weights: LoRAWeights, *, pin: bool = False, replace: bool = False
    ) -> Future[AdapterInfo]:
        return self.pool.load(name, self.save(name, weights), pin=pin, replace=replace)

    def load(
        self, name: str, weights: LoRAWeights, *, pin: bool = False, replace: bool = False
    ) -> AdapterInfo:
        future = self.ask(name, weights, pin=pin, replace=replace)
        self.run_jobs()
        return future.result(timeout=0)

    def run_jobs(self) -> None:
        """As the loader's thread: all there is to do, and again whenever the pool says that there may be more."""
        self.pool.work.put(True)
        while not self.pool.work.empty():
            self.pool.work.get()
            while (job := self.pool.next_job()) is not None:
                self.do(job)
                self.pool.check_integrity()

    def do(self, job: Read | Bring) -> None:
        try:
            if isinstance(job, Read):
                weights = self.read(job)
                self.pool.was_read(job.generation, self.arena.pack(weights), weights.digest, weights.rank)
            else:
                copy = job.generation.copy or self.arena.pack(self.read(job))
                for victim in job.victims:
                    self.evict(victim)
                self.pool.placed(job, self.arena.place(copy))
        except AdapterLoadError as error:
            self.pool.failed(job, error)

    def read(self, job: Read | Bring) -> LoRAWeights:
        self.num_reads += 1
        source, ref = job.generation.source, job.generation.ref
        assert source is not None
        weights = self.folders.get(source)
        if weights is None or (ref is not None and ref.digest != weights.digest):
            raise AdapterLoadError(f"{source} is gone or has changed")
        return weights

    def evict(self, victim: Generation) -> None:
        self.pool.evicted(victim, self.arena.copy_out(victim.slot) if victim.stored else None)

    def residency(self) -> dict[str, str]:
        return {info.name: info.residency for info in self.pool.infos()}
