"""LoRASite: where in the model adapters may act."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRASite:
    """One packed linear of the model whose output adapters may change."""

    index: int
    """Position in the model's list of sites."""

    in_features: int

    modules: tuple[str, ...]
    """The Hugging Face paths of its projections: "model.layers.0.self_attn.q_proj", ..."""

    out_features: tuple[int, ...]
    """One per module; they stand side by side in the linear's output."""
