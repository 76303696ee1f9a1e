"""`motet info`: what motet sees of this machine, and what a model is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from motet import Engine, EngineConfig, ModelInfo, cpu_backend

LIBRARIES = ("torch", "tokenizers", "safetensors", "gguf", "transformers", "peft", "triton")
GIB = 1 << 30


def run(model: str | None, config: EngineConfig) -> None:
    """Raises the model errors."""
    console = Console()
    console.print(_table("motet " + version("motet"), _machine()))
    if model is not None:
        with Engine(model, config) as engine:
            console.print(_table(model, _describe(engine.model_info())))


def _machine() -> dict[str, str]:
    memory = psutil.virtual_memory()
    return {
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cores": f"{psutil.cpu_count(logical=False)} ({os.cpu_count()} threads)",
        "CPU backend": cpu_backend(),
        "memory": f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB free",
        **{name: _version(name) for name in LIBRARIES},
    }


def _describe(info: ModelInfo) -> dict[str, str]:
    return {
        "architecture": info.architecture,
        "parameters": f"{info.num_parameters:,} in {info.num_layers} layers",
        "vocabulary": f"{info.vocab_size:,} tokens; {', '.join(map(str, info.eos_token_ids)) or 'none'} end a text",
        "context": f"{info.max_model_len:,} tokens",
        "KV cache": f"{info.kv_bytes_per_token / 1024:.1f} KiB a token",
        "adapters may change": ", ".join(info.adapter_targets),
        "runs in": f"{info.dtype} on {info.device}, backend {info.backend}",
        "because": info.why,
        "digest": info.digest,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _table(title: str, facts: dict[str, str]) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=False)
    for name, fact in facts.items():
        table.add_row(name, Text(fact))
    return table
