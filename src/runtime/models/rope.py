"""Rotary position embeddings (RoPE, arXiv 2104.09864): which frequencies, and their cos and sin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from motet.errors import CorruptCheckpoint, UnsupportedModel
from motet.kernels.ops import Ops

SUPPORTED_ROPE_TYPES = ("default", "llama3")

FREQUENCY_DIVISORS = "frequency_divisors"
"""The rope type that `gguf_config.py` writes for files that hold the divisors (`rope_freqs.weight`)."""

Positive = Annotated[float, Field(gt=0)]


class Llama3Scaling(BaseModel):
    """Llama 3.1's stretch of the low frequencies (arXiv 2407.21783)."""

    model_config = ConfigDict(frozen=True, strict=True)

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Positive


class RopeConfig(BaseModel):
    """How fast each pair of dimensions turns: theta^(-2i / head_dim), then stretched or divided."""

    model_config = ConfigDict(frozen=True, strict=True)

    theta: Positive
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None  # head_dim / 2 of them


def read_rope(config: Mapping[str, Any]) -> RopeConfig:
    """The RoPE of a `config.json`: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    What is absent is filled in as transformers does. Raises `UnsupportedModel` for other rope types.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CorruptCheckpoint(f"config: rope_parameters is {parameters!r}; an object is needed")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModel(
            "config: rope_parameters differ between layer types; one set for all is supported"
        )
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UnsupportedModel(
            f"config: partial_rotary_factor is {partial}; only whole heads (1.0) are supported"
        )
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == FREQUENCY_DIVISORS:
        return RopeConfig(theta=theta, divisors=parameters["divisors"])
    if rope_type == "llama3":
        original = config.get(
            "original_max_position_embeddings",
            parameters.get("original_max_position_embeddings", config.get("max_position_embeddings")),
        )
        scaling = Llama3Scaling.model_validate({**parameters, "original_max_position_embeddings": original})
        return RopeConfig(theta=theta, llama3=scaling)
    raise UnsupportedModel(
        f"config: rope_type is {rope_type!r}; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
    )


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions. [head_dim / 2] float32."""
    frequencies = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if config.divisors is not None:
        return frequencies / torch.tensor(config.divisors)
    return frequencies if config.llama3 is None else _stretch(frequencies, config.llama3)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow turns are slowed by `factor`, fast ones kept, those between blended."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


class Rope:
    """cos and sin for a step's positions."""

    def __init__(self, config: RopeConfig, head_dim: int, ops: Ops) -> None:
        self._frequencies = inverse_frequencies(config, head_dim).to(ops.device)
        self._dtype = ops.dtype

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin [T, head_dim] D, as `Ops.rope_and_store_kv` takes them.

        Computed in float32, as transformers does.
        """
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype)
