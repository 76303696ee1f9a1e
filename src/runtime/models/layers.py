"""Layers that models are built of. `make_linear` is the only way to a linear: LoRA acts there, and later
weight formats and tensor parallelism will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from motet.kernels.ops import LinearWeight, Ops
from motet.lora.sites import LoRASite
from motet.runtime.models.base import Weight
from motet.runtime.models.matrix import Matrix

if TYPE_CHECKING:
    from motet.runtime.forward_batch import ForwardBatch

LinearKind = Literal["column", "row", "replicated"]
"""Along which side the weight could be cut over devices: its outputs, its inputs, neither."""


@dataclass
class Linear:
    """Projections with one input, packed into a single product, plus the rows' adapters."""

    ops: Ops
    kind: LinearKind
    modules: tuple[str, ...]
    out_features: tuple[int, ...]
    site: LoRASite | None
    weight: LinearWeight  # [sum(out_features), in_features] D: a `Matrix` until `pack`
    bias: Tensor | None  # [sum(out_features)] A

    def __call__(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        """x [T, in_features] A -> [T, sum(out_features)] A, the adapters' deltas added."""
        y = self.ops.linear(x, self.weight, self.bias)
        if batch.lora is not None and self.site is not None:
            batch.lora.add_delta(self.site, x, y)
        return y

    def weights(self) -> dict[str, Weight]:
        """Each projection's `.weight` (and `.bias`), bound to its slice. Only until `pack`."""
        bound = {f"{module}.weight": w for module, w in zip(self.modules, self.weight.weights, strict=True)}
        if self.bias is not None:
            biases = torch.split(self.bias, list(self.out_features))
            bound |= {f"{module}.bias": Weight(b) for module, b in zip(self.modules, biases, strict=True)}
        return bound

    def pack(self) -> None:
        self.weight = self.weight.pack(self.ops.pack_linear)
        if self.site is not None:
            self.site = replace(self.site, weight=partial(self.ops.unpack_linear, self.weight))


class RMSNorm:
    """A root-mean-square norm (arXiv 1910.07467) of `size` values, its weight still empty."""

    def __init__(self, ops: Ops, size: int, eps: float, offset: int = 0) -> None:
        """offset: added to the weight that the checkpoint holds; then the weight is kept in float32."""
        self._ops = ops
        self._eps = eps
        dtype = torch.float32 if offset else ops.activations
        self._weight = torch.empty(size, dtype=dtype, device=ops.device)
        self.weight = OffsetWeight(self._weight, offset) if offset else Weight(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] A -> the same shape."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x, in place, and its norm. Both [T, size] A."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)

    def of_heads(self, x: Tensor, first: int, last: int) -> None:
        """In place, of each `size` values in the columns [first, last) of x [T, N] A."""
        self._ops.rms_norm_heads(x, first, last, self._weight, self._eps)


@dataclass(frozen=True)
class OffsetWeight(Weight):
    """A parameter that the checkpoint holds less a constant."""

    offset: float

    def load(self, tensor: Tensor) -> None:
        self.target.copy_(tensor.to(self.target.dtype) + self.offset)


@dataclass(frozen=True)
class QKNorm:
    """The norms of q and k between their projection and the rope: of each head, or of all heads together."""

    path: str
    q_size: int
    kv_size: int
    q_norm: RMSNorm
    k_norm: RMSNorm

    def __call__(self, qkv: Tensor) -> None:
        """qkv [T, q_size + 2 kv_size] A: q, k, v side by side; q and k in place."""
        self.q_norm.of_heads(qkv, 0, self.q_size)
        self.k_norm.of_heads(qkv, self.q_size, self.q_size + self.kv_size)

    def weights(self) -> dict[str, Weight]:
        return {
            f"{self.path}.q_norm.weight": self.q_norm.weight,
            f"{self.path}.k_norm.weight": self.k_norm.weight,
        }


def make_linear(
    ops: Ops,
    *,
    kind: LinearKind,
    in_features: int,
    splits: Sequence[tuple[str, int]],
    bias: bool = False,
    site_index: int | None = None,
) -> Linear:
    """A linear of one or more projections side by side, its parameters still empty.

    splits: (Hugging Face module path, out_features) of each projection. site_index: the linear's position
    among the model's LoRA sites; None where no adapter may act.
    """
    modules, out_features = (tuple(x) for x in zip(*splits, strict=True))
    b = torch.empty(sum(out_features), dtype=ops.activations, device=ops.device) if bias else None
    site = None if site_index is None else LoRASite(site_index, in_features, modules, out_features, bias=b)
    return Linear(
        ops=ops,
        kind=kind,
        modules=modules,
        out_features=out_features,
        site=site,
        weight=Matrix(ops, in_features, out_features),
        bias=b,
    )
