"""PEFT folders read and checked: adapter_config.json and adapter_model.safetensors -> LoRAWeights.

Nothing in the folder is ever executed, and what is not understood is an error, never a silent base output.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from motet.errors import AdapterLoadError, UnsupportedAdapter
from motet.lora.peft_config import MAX_RANK, PeftConfig, read_peft_config
from motet.lora.sites import LoRASite

if TYPE_CHECKING:  # the bookkeeping needs AdapterRef and must not load torch for it
    from torch import Tensor

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"

_KEY = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_FOREIGN_KEYS = (
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_", "LoRA of an embedding"),
    ("embed_tokens.", "LoRA or new weights of the embedding"),
    ("lm_head.", "LoRA or new weights of the output head"),
    ("modules_to_save.", "modules_to_save"),
    ("trainable_tokens_", "trainable_token_indices"),
)
_LORA_BIAS = re.compile(r"\.lora_[AB](\.[^.]+)?\.bias$")
MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself allows a header."""

_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class AdapterRef:
    """The identity of a loaded adapter; what a request holds on to.

    `generation` is never used twice by a pool, so a name that is loaded again is another adapter. Equal
    `digest`s compute the same.
    """

    name: str
    generation: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """A LoRA as the arena takes it.

    `modules` maps the path of each adapted projection to (A [r, in_features], B [out_features, r]), float32,
    finite, the scaling folded into B: out += B · A · x. `digest` is the same exactly for the same `modules`.
    """

    digest: bytes
    modules: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def rank(self) -> int:
        """The largest one."""
        return max(a.shape[0] for a, _ in self.modules.values())

    @property
    def nbytes(self) -> int:
        """Of the tensors as they are here; the arena keeps them in its own dtype."""
        return sum(a.nbytes + b.nbytes for a, b in self.modules.values())


_Projections = Mapping[str, tuple[int, int]]
"""{module path: (in_features, out_features)} of all that a LoRA may adapt."""


def read_adapter(path: str | os.PathLike[str], sites: Sequence[LoRASite]) -> LoRAWeights:
    """Reads the PEFT folder `path` for the model with these `sites`. Blocks; runs on any thread.

    Raises `AdapterLoadError` if files are missing, damaged or made for another model. Raises
    `UnsupportedAdapter`, naming the feature, for anything but a plain LoRA of rank 1 to 256.
    """
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise AdapterLoadError(
                f"there is no folder {folder}: an adapter is a folder as PEFT's `save_pretrained` writes it"
            )
        config = read_peft_config(folder)
        modules = _read_tensors(_weights_file(folder), config, _projections(sites))
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


def _projections(sites: Iterable[LoRASite]) -> _Projections:
    return {
        module: (site.in_features, out_features)
        for site in sites
        for module, out_features in zip(site.modules, site.out_features, strict=True)
    }


def _read_tensors(
    weights: Path, config: PeftConfig, projections: _Projections
) -> dict[str, tuple[Tensor, Tensor]]:
    from safetensors.torch import load  # torch is behind it

    largest = sum(8 * MAX_RANK * sum(features) for features in projections.values()) + MAX_HEADER_BYTES
    if weights.stat().st_size > largest:
        raise AdapterLoadError(f"{weights} is larger than any adapter of this model can be ({largest} bytes)")
    # Read, not mapped: another process may cut the file short meanwhile, and a map of it would crash this one.
    tensors = load(weights.read_bytes())
    bound = _bind(weights, list(tensors), projections)
    _check_targets(weights, config, bound)
    for module, keys in bound.items():
        _check_tensors(weights, tensors, keys, config, projections[module])
    modules = {}
    for module, keys in sorted(bound.items()):
        a = tensors[keys["A"]].float()
        b = tensors[keys["B"]].float() * config.scaling
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterLoadError(
                f"{weights}: the LoRA of {module} holds NaN or infinite values (in float32, times its "
                f"scaling of {config.scaling:g}): its training has diverged, or the file is damaged"
            )
        modules[module] = (a, b)
    return modules


def _bind(weights: Path, keys: Sequence[str], projections: _Projections) -> dict[str, dict[str, str]]:
    """{module path: {"A": key, "B": key}}, every key bound."""
    bound: dict[str, dict[str, str]] = {}
    strange, doubled = [], []
    for key in sorted(keys):
        _refuse_foreign(weights, key)
        match = _KEY.fullmatch(key)
        module = match and _module_path(match["module"], projections)
        if match is None or module is None:
            strange.append(key)
        elif match["side"] in bound.setdefault(module, {}):
            doubled.append(key)
        else:
            bound[module][match["side"]] = key
    if strange:
        kinds = sorted({path.rpartition(".")[2] for path in projections})
        raise AdapterLoadError(
            f"{weights}: {_listed(strange)} bind to nothing in this model: the adapter was made for another. "
            f"The modules of this model that can be adapted are called {', '.join(kinds)}"
        )
    if doubled:
        raise AdapterLoadError(f"{weights}: {_listed(doubled)} bind where other keys bind already")
    if not bound:
        raise AdapterLoadError(
            f"{weights} holds no tensor: the adapter was not saved as a whole. Save it again"
        )
    halves = [key for pair in bound.values() if len(pair) == 1 for key in pair.values()]
    if halves:
        raise AdapterLoadError(f"{weights}: {_listed(halves)} lack the other of lora_A and lora_B")
    return bound


def _refuse_foreign(weights: Path, key: str) -> None:
    for mark, feature in _FOREIGN_KEYS:
        if mark in key:
            raise UnsupportedAdapter(f"{weights}: {key} is {feature}, which motet does not compute")
    if _LORA_BIAS.search(key):
        raise UnsupportedAdapter(f"{weights}: {key} is lora_bias, which motet does not compute")


def _module_path(path: str, projections: _Projections) -> str | None:
    """The model's own path for one as PEFT or a tool around it wrote it."""
    while path.startswith("base_model.model."):
        path = path.removeprefix("base_model.model.")
    # Without "model." it was trained on the decoder without its head.
    return next((candidate for candidate in (path, f"model.{path}") if candidate in projections), None)


def _check_targets(weights: Path, config: PeftConfig, modules: Iterable[str]) -> None:
    """The tensors decide what is adapted; but of each target that the config lists there must be one."""
    paths = [module.split(".") for module in modules]
    present = {".".join(path[i:]) for path in paths for i in range(len(path))}
    missing = [target for target in config.targets if target not in present]
    if missing:
        raise AdapterLoadError(
            f"{weights} holds no tensor for {_listed(missing)} of the config's target_modules: it is not "
            "whole, or the model has no such modules. If this is meant, take them from target_modules"
        )


def _check_tensors(
    weights: Path,
    tensors: Mapping[str, Tensor],
    keys: Mapping[str, str],
    config: PeftConfig,
    features: tuple[int, int],
) -> None:
    in_features, out_features = features
    expected = {"A": [config.rank, in_features], "B": [out_features, config.rank]}
    for side, key in keys.items():
        shape, dtype = list(tensors[key].shape), str(tensors[key].dtype).removeprefix("torch.")
        if shape != expected[side]:
            raise AdapterLoadError(
                f"{weights}: {key} has the shape {shape}, but this model and the config's r = {config.rank} "
                f"need {expected[side]}: the adapter was made for another model, or has another's config"
            )
        if dtype not in _DTYPES:
            raise UnsupportedAdapter(f"{weights}: {key} is of dtype {dtype}; motet reads {_listed(_DTYPES)}")


def _digest(modules: Mapping[str, tuple[Tensor, Tensor]]) -> bytes:
    """blake2b-256 of all that determines the result, each part typed and with its length before it."""
    digest = hashlib.blake2b(digest_size=32, person=b"motet.lora")

    def add(kind: bytes, value: Any) -> None:
        view = memoryview(value)
        digest.update(kind + view.nbytes.to_bytes(8, "little"))
        digest.update(view)

    for module, (a, b) in sorted(modules.items()):
        add(b"m", module.encode())
        for tensor in (a, b):
            add(b"s", b"".join(n.to_bytes(8, "little") for n in tensor.shape))
            add(b"f", tensor.view(-1).numpy())  # float32
    return digest.digest()


def _listed(names: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
