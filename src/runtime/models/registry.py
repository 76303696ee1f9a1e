"""Which class runs which architecture of `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from motet.errors import UnsupportedModel
from motet.runtime.models.base import CausalLM
from motet.runtime.models.decoder import Decoder
from motet.runtime.models.families import FAMILIES
from motet.runtime.models.plugins import find_plugin, plugin_names

MODELS: Mapping[str, type[CausalLM]] = MappingProxyType(dict.fromkeys(FAMILIES, Decoder))


def find_model_class(config: Mapping[str, Any]) -> type[CausalLM]:
    """The class for the config's first architecture: motet's own or a plug-in's.

    Raises `UnsupportedModel`, listing what is supported; `ModelError` for a plug-in at fault.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    found = find_plugin(name, MODELS.get(name)) if isinstance(name, str) else None
    if found is None:
        supported = ", ".join(sorted({*MODELS, *plugin_names()}))
        raise UnsupportedModel(f"config: architectures is {architectures!r}; supported are {supported}")
    return found
