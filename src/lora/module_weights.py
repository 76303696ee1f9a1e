"""One module's tensors as an adapter's file holds them -> ModuleLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from motet.errors import AdapterLoadError, UnsupportedAdapter
from motet.lora.adapter import ModuleLoRA
from motet.lora.binding import BoundModule
from motet.lora.refusals import listed
from motet.lora.sites import Projection

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NORM_ROWS = 1024
"""How many rows of a weight DoRA's norms are computed of at once: what is needed beside the weight stays small."""


def read_module(file: Path, module: BoundModule, tensors: Mapping[str, Tensor]) -> ModuleLoRA | None:
    """What the adapter does to the module; None if nothing.

    Raises `AdapterLoadError` for tensors of a wrong shape and for values that are not finite,
    `UnsupportedAdapter` for other dtypes and for a copy of the base model's weight that is not one.
    """
    projection, target = module.projection, module.target
    parts = {part: _checked(file, module, part, key, tensors[key]) for part, key in module.parts.items()}
    if "weight" in parts:
        _check_copy(file, module, parts["weight"])
    scaling = 0.0 if target is None else target.scaling
    lora = _assemble(file, projection, parts, scaling)
    if not all(tensor.isfinite().all() for tensor in lora.tensors()):
        raise AdapterLoadError(
            f"{file}: the LoRA of {projection.path} holds NaN or infinite values (in float32, times its "
            f"scaling of {scaling:g}): its training has diverged, or the file is damaged"
        )
    if not len(lora.a) and lora.shift is None:
        return None
    return lora


def _checked(file: Path, module: BoundModule, part: str, key: str, tensor: Tensor) -> Tensor:
    """The tensor in float32 (a copy of the base model's weight as it is)."""
    in_features, out_features = module.projection.in_features, module.projection.out_features
    rank = 0 if module.target is None else module.target.rank
    if tensor.dtype not in _DTYPES:
        known = listed(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UnsupportedAdapter(
            f"{file}: {key} is of dtype {str(tensor.dtype).removeprefix('torch.')}; motet reads {known}"
        )
    if part == "weight":
        return tensor
    a, b = [rank, in_features], [out_features, rank]
    shape = {"lora_A": a, "lora_embedding_A": a, "lora_B": b, "lora_embedding_B": b}.get(part, [out_features])
    if list(tensor.shape) != shape:
        raise AdapterLoadError(
            f"{file}: {key} has the shape {list(tensor.shape)}, but this model and the config's r = {rank} "
            f"need {shape}: the adapter was made for another model, or has another's config"
        )
    return tensor.float()


def _assemble(file: Path, projection: Projection, parts: Mapping[str, Tensor], scaling: float) -> ModuleLoRA:
    a = parts.get("lora_A", parts.get("lora_embedding_A", torch.zeros(0, projection.in_features)))
    b = parts.get("lora_B", parts.get("lora_embedding_B", torch.zeros(projection.out_features, 0))) * scaling
    old = torch.zeros(projection.out_features) if projection.bias is None else projection.bias.float().cpu()
    shift = parts.get("bias", old) - old
    if "lora_B.bias" in parts:
        shift = shift + scaling * parts["lora_B.bias"]
    scale = None
    if "lora_magnitude_vector" in parts:
        scale = parts["lora_magnitude_vector"] / _norms(file, projection, a, b)
        # The base model's bias is no part of what DoRA scales.
        shift = shift + (1 - scale) * old
        b = b * scale[:, None]
    return ModuleLoRA(a, b, scale, shift if shift.any() else None)


def _norms(file: Path, projection: Projection, a: Tensor, b: Tensor) -> Tensor:
    """The length of each row of W + B · A, as DoRA divides by (arXiv 2402.09353, section 4.3). [out_features]"""
    weight = _base_weight(file, projection, "DoRA")[projection.rows]
    chunks = [slice(first, first + _NORM_ROWS) for first in range(0, len(b), _NORM_ROWS)]
    return torch.cat([(weight[rows].float().cpu() + b[rows] @ a).norm(dim=1) for rows in chunks])


def _base_weight(file: Path, projection: Projection, feature: str) -> Tensor:
    if projection.site.weight is None:
        raise UnsupportedAdapter(
            f"{file}: {feature} of {projection.path} needs the base model's weight, which this model does not give"
        )
    return projection.site.weight()


def _check_copy(file: Path, module: BoundModule, weight: Tensor) -> None:
    """PEFT saves a copy of the embedding and the output head beside their LoRA: it must be the model's own."""
    projection = module.projection
    own = _base_weight(file, projection, "a copy of the weight")
    if weight.shape != own.shape or not torch.equal(weight.to(own), own):
        raise UnsupportedAdapter(
            f"{file}: {module.parts['weight']} differs from the base model's own: new weights of "
            f"{'the embedding' if projection.site.role == 'embedding' else 'the output head'} for one adapter "
            "are not computed. If it was trained on this model, save it with save_embedding_layers=False"
        )
