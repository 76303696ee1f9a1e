"""motet: embedded LLM inference, many tenants on one base model, each through its own LoRA adapter.

The public names load on first use, so that `import motet` costs next to nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `as` makes each a public name for type checkers
    from motet.config import EngineConfig as EngineConfig
    from motet.errors import AdapterError as AdapterError
    from motet.errors import AdapterExists as AdapterExists
    from motet.errors import AdapterLoadError as AdapterLoadError
    from motet.errors import AdapterNotAllowed as AdapterNotAllowed
    from motet.errors import AdapterNotFound as AdapterNotFound
    from motet.errors import BackendUnavailable as BackendUnavailable
    from motet.errors import CorruptCheckpoint as CorruptCheckpoint
    from motet.errors import DeadlineExceeded as DeadlineExceeded
    from motet.errors import EngineClosed as EngineClosed
    from motet.errors import EngineDead as EngineDead
    from motet.errors import InvalidRequest as InvalidRequest
    from motet.errors import ModelError as ModelError
    from motet.errors import ModelNotFound as ModelNotFound
    from motet.errors import MotetError as MotetError
    from motet.errors import PromptTooLong as PromptTooLong
    from motet.errors import QueueFull as QueueFull
    from motet.errors import QuotaExceeded as QuotaExceeded
    from motet.errors import RequestAborted as RequestAborted
    from motet.errors import RequestFailed as RequestFailed
    from motet.errors import UnsupportedAdapter as UnsupportedAdapter
    from motet.errors import UnsupportedModel as UnsupportedModel
    from motet.kernels.cpu.library import cpu_backend as cpu_backend
    from motet.lora.generation import AdapterInfo as AdapterInfo
    from motet.params import LogitsProcessor as LogitsProcessor
    from motet.params import SamplingParams as SamplingParams
    from motet.params import TenantPolicy as TenantPolicy
    from motet.runtime.model_info import ModelInfo as ModelInfo
    from motet.runtime.models.plugins import register_model as register_model
    from motet.runtime.statistics import EngineStats as EngineStats
    from motet.sdk.blocking import Engine as Engine
    from motet.sdk.engine import AsyncEngine as AsyncEngine
    from motet.sdk.hooks import AdmittedRequest as AdmittedRequest
    from motet.sdk.hooks import FinishedRequest as FinishedRequest
    from motet.sdk.outputs import Completion as Completion
    from motet.sdk.outputs import CompletionOutput as CompletionOutput
    from motet.sdk.outputs import Token as Token
    from motet.sdk.outputs import Usage as Usage
    from motet.sdk.stream import TokenStream as TokenStream

logging.getLogger("motet").addHandler(logging.NullHandler())  # quiet unless the application asks

_HOMES = {
    "motet.config": ["EngineConfig"],
    "motet.errors": [
        "AdapterError",
        "AdapterExists",
        "AdapterLoadError",
        "AdapterNotAllowed",
        "AdapterNotFound",
        "BackendUnavailable",
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
        "QuotaExceeded",
        "RequestAborted",
        "RequestFailed",
        "UnsupportedAdapter",
        "UnsupportedModel",
    ],
    "motet.kernels.cpu.library": ["cpu_backend"],
    "motet.lora.generation": ["AdapterInfo"],
    "motet.params": ["LogitsProcessor", "SamplingParams", "TenantPolicy"],
    "motet.sdk.blocking": ["Engine"],
    "motet.sdk.engine": ["AsyncEngine"],
    "motet.sdk.hooks": ["AdmittedRequest", "FinishedRequest"],
    "motet.runtime.model_info": ["ModelInfo"],
    "motet.runtime.models.plugins": ["register_model"],
    "motet.runtime.statistics": ["EngineStats"],
    "motet.sdk.outputs": ["Completion", "CompletionOutput", "Token", "Usage"],
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
