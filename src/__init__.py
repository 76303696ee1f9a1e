"""motet: embedded LLM inference, many tenants on one base model, each through its own LoRA adapter.

The public names load on first use, so that `import motet` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.config import EngineConfig
    from motet.errors import (
        AdapterError,
        AdapterExists,
        AdapterLoadError,
        AdapterNotFound,
        CorruptCheckpoint,
        DeadlineExceeded,
        EngineClosed,
        EngineDead,
        InvalidRequest,
        ModelError,
        ModelNotFound,
        MotetError,
        PromptTooLong,
        QueueFull,
        RequestAborted,
        RequestFailed,
        UnsupportedAdapter,
        UnsupportedModel,
    )
    from motet.lora.pool import AdapterInfo
    from motet.params import SamplingParams
    from motet.sdk.engine import AsyncEngine
    from motet.sdk.outputs import Completion, CompletionOutput, EngineStats, Token, Usage
    from motet.sdk.stream import TokenStream

_HOMES = {
    "motet.config": ["EngineConfig"],
    "motet.errors": [
        "AdapterError",
        "AdapterExists",
        "AdapterLoadError",
        "AdapterNotFound",
        "CorruptCheckpoint",
        "DeadlineExceeded",
        "EngineClosed",
        "EngineDead",
        "InvalidRequest",
        "ModelError",
        "ModelNotFound",
        "MotetError",
        "PromptTooLong",
        "QueueFull",
        "RequestAborted",
        "RequestFailed",
        "UnsupportedAdapter",
        "UnsupportedModel",
    ],
    "motet.lora.pool": ["AdapterInfo"],
    "motet.params": ["SamplingParams"],
    "motet.sdk.engine": ["AsyncEngine"],
    "motet.sdk.outputs": ["Completion", "CompletionOutput", "EngineStats", "Token", "Usage"],
    "motet.sdk.stream": ["TokenStream"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'motet' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
