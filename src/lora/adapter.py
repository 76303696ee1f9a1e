"""PEFT folders read and checked: adapter_config.json and adapter_model.safetensors -> LoRAWeights.

Nothing in the folder is ever executed, and what is not understood is an error, never a silent base output.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from motet.errors import AdapterLoadError
from motet.lora.binding import bind
from motet.lora.peft_config import MAX_RANK, PeftConfig, read_peft_config
from motet.lora.sites import LoRASite, projections

if TYPE_CHECKING:  # the bookkeeping needs AdapterRef and must not load torch for it
    from torch import Tensor

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"

MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself allows a header."""


@dataclass(frozen=True)
class AdapterRef:
    """The identity of a loaded adapter; what a request holds on to.

    `generation` is never used twice by a pool, so a name that is loaded again is another adapter. Equal
    `digest`s compute the same.
    """

    name: str
    generation: int
    digest: bytes


class ModuleLoRA(NamedTuple):
    """What an adapter does to one projection: y = scale · y + shift + B · A · x, with y the base model's own.

    All float32 and finite; the LoRA's scaling, and DoRA's, is folded into B.
    """

    a: Tensor  # [r, in_features]; r = 0: no LoRA
    b: Tensor  # [out_features, r]
    scale: Tensor | None = None  # [out_features]; None: 1
    shift: Tensor | None = None  # [out_features]; None: 0

    def tensors(self) -> list[Tensor]:
        """Those that there are, in this order."""
        return [tensor for tensor in self if tensor is not None]


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """An adapter as the arena takes it.

    `modules` holds what each adapted projection gets, by its path. `digest` is the same exactly for the same
    `modules`.
    """

    digest: bytes
    modules: Mapping[str, ModuleLoRA]

    @property
    def rank(self) -> int:
        """The largest one."""
        return max(len(module.a) for module in self.modules.values())


def read_adapter(path: str | os.PathLike[str], sites: Sequence[LoRASite]) -> LoRAWeights:
    """Reads the PEFT folder `path` for the model with these `sites`. Blocks; runs on any thread.

    Raises `AdapterLoadError` if files are missing, damaged or made for another model. Raises
    `UnsupportedAdapter`, naming the feature, for what motet does not compute.
    """
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise AdapterLoadError(
                f"there is no folder {folder}: an adapter is a folder as PEFT's `save_pretrained` writes it"
            )
        config = read_peft_config(folder)
        modules = _read_modules(_weights_file(folder), config, sites)
    except OSError as error:
        raise AdapterLoadError(f"cannot read the adapter in {folder}: {error}") from error
    except SafetensorError as error:
        raise AdapterLoadError(
            f"{folder / WEIGHTS_NAME} is damaged ({error}), perhaps cut short. Copy or save it again"
        ) from error
    return LoRAWeights(_digest(modules), modules)


def _weights_file(folder: Path) -> Path:
    weights = folder / WEIGHTS_NAME
    if weights.is_file():
        return weights
    if (folder / _PICKLE_NAME).exists():
        raise AdapterLoadError(
            f"{folder} holds a {_PICKLE_NAME}, a pickle: opening one can run any code, so motet never does. "
            "Where you trust it, convert it: load it with PEFT's `PeftModel.from_pretrained` and call "
            f"`save_pretrained` on the result, which writes {WEIGHTS_NAME}"
        )
    raise AdapterLoadError(
        f"there is no {weights}: PEFT's `save_pretrained` writes it beside adapter_config.json"
    )


def _read_modules(file: Path, config: PeftConfig, sites: Sequence[LoRASite]) -> dict[str, ModuleLoRA]:
    from safetensors.torch import load  # torch is behind it

    from motet.lora.module_weights import read_module

    modules = projections(sites)
    # Of each projection at most A and B of the highest rank and, of an embedding, a copy of itself.
    largest = MAX_HEADER_BYTES + sum(
        8 * ((MAX_RANK + 3) * (m.in_features + m.out_features) + m.in_features * m.out_features)
        for m in modules.values()
    )
    if file.stat().st_size > largest:
        raise AdapterLoadError(f"{file} is larger than any adapter of this model can be ({largest} bytes)")
    # Read, not mapped: another process may cut the file short meanwhile, and a map of it would crash this one.
    tensors = load(file.read_bytes())
    bound = bind(file, tensors, config, modules)
    read = {module.projection.path: read_module(file, module, tensors) for module in bound}
    return {path: module for path, module in read.items() if module is not None}


def _digest(modules: Mapping[str, ModuleLoRA]) -> bytes:
    """blake2b-256 of all that determines the result, each part typed and with its length before it."""
    digest = hashlib.blake2b(digest_size=32, person=b"motet.lora")

    def add(kind: bytes, value: Any) -> None:
        view = memoryview(value)
        digest.update(kind + view.nbytes.to_bytes(8, "little"))
        digest.update(view)

    for path, module in sorted(modules.items()):
        add(b"m", path.encode())
        for kind, tensor in zip((b"a", b"b", b"c", b"d"), module, strict=True):
            if tensor is not None:
                add(b"s", b"".join(n.to_bytes(8, "little") for n in tensor.shape))
                add(kind, tensor.reshape(-1).numpy())  # float32
    return digest.digest()
