"""Generation: one load of an adapter, the leases on it, and the jobs that move it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from motet.lora.adapter import AdapterRef

if TYPE_CHECKING:  # torch is behind it
    from motet.lora.arena import PackedAdapter

Residency = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class AdapterInfo:
    """A snapshot of one loaded adapter."""

    name: str
    generation: int
    """Counts the loads of the engine; never used twice."""
    digest: str
    """Hexadecimal; equal ones compute the same."""
    rank: int
    """The largest of its modules."""
    bytes: int
    """On the device, when it is there."""
    residency: Residency
    """Where its weights are. "disk": its folder will be read again."""
    pinned: bool
    in_use: int
    """Requests that hold it, those that wait for its weights included."""


@dataclass(eq=False)
class Generation:
    """One load of an adapter. Belongs to the `AdapterPool`, under whose lock it is read and changed.

    It is alive from its first mention until it has no name any more, nobody holds it and nobody waits for it.
    """

    name: str
    source: Path | None = None
    """The folder; None: the resolver is to say."""
    pinned: bool = False
    replace: bool = False
    ref: AdapterRef | None = None
    """None until it was read for the first time."""
    rank: int = 0
    nbytes: int = 0
    """Of the arena or of host memory."""
    published: bool = False
    """Whether the name has once stood for it."""
    slot: int = -1
    """The adapter slot; -1: not on the device."""
    copy: PackedAdapter | None = None
    """Its weights in host memory."""
    stored: bool = False
    """Whether that copy counts in `adapter_host_bytes`; it does not while the loader has it in hand."""
    busy: bool = False
    """The loader is reading or moving it."""
    holds: int = 0
    """Leases that have its slot: it stays on the device."""
    waiting: list[AdapterLease] = field(default_factory=list)
    """Leases that wait for it to be there."""
    last_used: int = 0
    """On the pool's own scale."""

    @property
    def is_placed(self) -> bool:
        """On the device, to stay there for now."""
        return self.slot >= 0 and not self.busy

    @property
    def residency(self) -> Residency:
        if self.slot >= 0:
            return "device"
        return "disk" if self.copy is None else "host"

    def info(self) -> AdapterInfo:
        assert self.ref is not None
        return AdapterInfo(
            name=self.name,
            generation=self.ref.generation,
            digest=self.ref.digest.hex(),
            rank=self.rank,
            bytes=self.nbytes,
            residency=self.residency,
            pinned=self.pinned,
            in_use=self.holds + len(self.waiting),
        )


@dataclass(eq=False, slots=True)
class AdapterLease:
    """One request's hold on an adapter, from `AdapterPool.acquire` to `release`."""

    generation: Generation
    slot: int = -1
    """The adapter slot, its own until it is released; -1 until the adapter is on the device."""
    ready: Future[None] | None = None
    """Done when it has its slot, or with the `AdapterError` because of which it gets none. None: it has one."""

    @property
    def name(self) -> str:
        return self.generation.name

    @property
    def ref(self) -> AdapterRef | None:
        """What it holds; None until that was read for the first time."""
        return self.generation.ref


@dataclass(frozen=True, slots=True)
class Read:
    """Read `generation` for the first time."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Bring:
    """Bring `generation` to the device, once `victims` have left it."""

    generation: Generation
    victims: tuple[Generation, ...]
    """Idle ones. A `stored` one goes to host memory, the others are on disk only."""
    is_reload: bool
    """It comes from host memory or from disk; not straight from having been read for the first time."""
