"""Rotary position embeddings (RoPE, arXiv 2104.09864): which frequencies, and their cos and sin."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from motet.kernels.ops import Ops

FREQUENCY_DIVISORS = "frequency_divisors"
"""The rope type that `gguf_config.py` writes for files that hold the divisors (`rope_freqs.weight`)."""

Positive = Annotated[float, Field(gt=0)]


class Scaling(BaseModel):
    """How a rope was changed to reach beyond the context that it was first trained for."""

    model_config = ConfigDict(frozen=True, strict=True)

    magnitude: Positive = 1.0
    """What cos and sin are multiplied by."""

    @abstractmethod
    def frequencies(self, periods: Tensor, theta: float) -> Tensor:
        """periods [n] float32: theta^(i / n) of each pair of dimensions -> radians per position [n] float32."""


class LinearScaling(Scaling):
    """All turns slowed alike (arXiv 2306.15595)."""

    factor: Positive

    def frequencies(self, periods: Tensor, theta: float) -> Tensor:
        return 1.0 / periods / self.factor


class DivisorScaling(Scaling):
    """Each turn slowed by a number of its own; also how LongRoPE (arXiv 2402.13753) ends up."""

    divisors: tuple[Positive, ...]

    def frequencies(self, periods: Tensor, theta: float) -> Tensor:
        return 1.0 / (torch.tensor(self.divisors) * periods)


class Llama3Scaling(Scaling):
    """Llama 3.1 (arXiv 2407.21783): slow turns are slowed, fast ones kept, those between blended."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Positive

    def frequencies(self, periods: Tensor, theta: float) -> Tensor:
        frequencies = 1.0 / periods
        turns = self.original_max_position_embeddings / (2 * math.pi / frequencies)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0, 1)
        return (1 - share) * frequencies / self.factor + share * frequencies


class YarnScaling(Scaling):
    """YaRN (arXiv 2309.00071): likewise, but blended along the dimensions instead of the turns."""

    factor: Positive
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    original_max_position_embeddings: Positive

    def frequencies(self, periods: Tensor, theta: float) -> Tensor:
        pairs = len(periods)

        def pair_that_turns(times: float) -> float:
            context = self.original_max_position_embeddings / (times * 2 * math.pi)
            return pairs * math.log(context) / math.log(theta)

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        if low == high:
            high += 0.001
        kept = 1 - ((torch.arange(pairs).float() - low) / (high - low)).clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


AnyScaling = LinearScaling | DivisorScaling | Llama3Scaling | YarnScaling


class RopeConfig(BaseModel):
    """How fast each pair of dimensions turns: theta^(-2i / rotary_dim), scaled."""

    model_config = ConfigDict(frozen=True, strict=True)

    rotary_dim: Annotated[int, Field(ge=0, multiple_of=2)]
    """How many dimensions of each head turn, the first ones. 0: none (NoPE, arXiv 2305.19466)."""

    theta: Positive = 10_000.0
    max_length: Annotated[int, Field(gt=0)] | None = None
    """Longest sequence, in tokens, that turns so. None: any."""

    scaling: AnyScaling | None = None

    @model_validator(mode="after")
    def _one_divisor_for_each_pair(self) -> RopeConfig:
        pairs = self.rotary_dim // 2
        if isinstance(self.scaling, DivisorScaling) and len(self.scaling.divisors) != pairs:
            raise ValueError(
                f"{len(self.scaling.divisors)} divisors; {pairs} pairs of dimensions need as many"
            )
        return self

    def frequencies(self) -> Tensor:
        """Radians per position of each pair of dimensions. [rotary_dim / 2] float32."""
        periods = self.theta ** (torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim)
        return 1.0 / periods if self.scaling is None else self.scaling.frequencies(periods, self.theta)


class Rope:
    """cos and sin for a step's positions."""

    def __init__(self, config: RopeConfig, ops: Ops) -> None:
        self._ops = ops
        self._frequencies = config.frequencies().to(ops.device)
        self._magnitude = 1.0 if config.scaling is None else config.scaling.magnitude

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin [T, rotary_dim] A, as `Ops.rope_and_store_kv` takes them."""
        return self._ops.rope_cos_sin(positions, self._frequencies, self._magnitude)
