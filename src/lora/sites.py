"""LoRASite: where in the model adapters may act."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoRASite:
    """One packed linear of the model, or its embedding, whose output adapters may change."""

    index: int
    """Position in the model's list of sites."""

    in_features: int
    """Of an embedding: the size of the vocabulary."""

    modules: tuple[str, ...]
    """The Hugging Face paths of its projections: "model.layers.0.self_attn.q_proj", ..."""

    out_features: tuple[int, ...]
    """One per module; they stand side by side in the linear's output."""

    role: Literal["layer", "head", "embedding"] = "layer"

    weight: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)
    """Gives the base model's own [sum(out_features), in_features], maybe as a copy; of an embedding
    [in_features, out_features]. None: not to be had, so adapters that need it cannot be computed."""

    bias: Tensor | None = field(default=None, compare=False, repr=False)
    """The base model's own [sum(out_features)]. None: it has none."""


@dataclass(frozen=True)
class Projection:
    """One module of a site."""

    path: str
    site: LoRASite
    rows: slice
    """Its rows of the site's weight."""

    @property
    def in_features(self) -> int:
        return self.site.in_features

    @property
    def out_features(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def bias(self) -> Tensor | None:
        """[out_features]"""
        return None if self.site.bias is None else self.site.bias[self.rows]


def projections(sites: Iterable[LoRASite]) -> dict[str, Projection]:
    """{path: Projection} of all that an adapter may change."""
    found = {}
    for site in sites:
        first = 0
        for path, out_features in zip(site.modules, site.out_features, strict=True):
            found[path] = Projection(path, site, slice(first, first + out_features))
            first += out_features
    return found
