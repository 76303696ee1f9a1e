"""Which class runs which architecture of `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from motet.errors import UnsupportedModel
from motet.runtime.models.base import CausalLM
from motet.runtime.models.decoder import Decoder

MODELS: Mapping[str, type[CausalLM]] = MappingProxyType(
    {
        "LlamaForCausalLM": Decoder,  # Llama 2 and 3, SmolLM2
        "Qwen2ForCausalLM": Decoder,
    }
)


def find_model_class(config: Mapping[str, Any]) -> type[CausalLM]:
    """The class for the config's first architecture. Raises `UnsupportedModel`, listing what is supported."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in MODELS:
        raise UnsupportedModel(
            f"config: architectures is {architectures!r}; supported are {', '.join(sorted(MODELS))}"
        )
    return MODELS[name]
