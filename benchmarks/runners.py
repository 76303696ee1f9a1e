"""Who can be compared: each runner's module, its options and the environment that it runs in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.common import BF16_GGUF, INSTALLED, PEERS_FOLDER, Q4_1_GGUF


class Runner(NamedTuple):
    module: str
    options: tuple[str, ...] = ()
    environment: str | None = None  # below PEERS_FOLDER; None: ours

    @property
    def python(self) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return PEERS_FOLDER / self.environment / "bin/python"

    @property
    def installed(self) -> bool:
        return self.environment is None or (PEERS_FOLDER / self.environment / INSTALLED).exists()

    @property
    def command(self) -> list[str]:
        return [str(self.python), "-m", f"benchmarks.{self.module}", *self.options]


BF16 = ("--dtype", "bfloat16")
INT8 = (*BF16, "--quantization", "int8")
ON_BF16_GGUF = ("--model", str(BF16_GGUF))
ON_Q4_1_GGUF = ("--model", str(Q4_1_GGUF))

RUNNERS: Mapping[str, Runner] = MappingProxyType(
    {
        "motet-bf16": Runner("engine", BF16),
        "motet-bf16-kv256": Runner("engine", (*BF16, "--kv-cache-mib", "256")),
        "motet-int8": Runner("engine", INT8),
        "motet-int4": Runner("engine", (*BF16, "--quantization", "int4")),
        "ceiling": Runner("ceiling"),
        "steps-bf16": Runner("steps", (*BF16, "--batches", "8", "32")),
        "steps-int8": Runner("steps", (*INT8, "--batches", "1")),
        "transformers": Runner("peers.transformers_static", BF16),
        "transformers-continuous": Runner("peers.transformers_continuous", BF16),
        "llama-cpp-bf16": Runner("peers.llama_cpp", ON_BF16_GGUF, "llama_cpp"),
        "llama-cpp-q4_1": Runner("peers.llama_cpp", ON_Q4_1_GGUF, "llama_cpp"),
        "llama-server-bf16": Runner("peers.llama_server", ON_BF16_GGUF, "llama_cpp"),
        "llama-server-q4_1": Runner("peers.llama_server", ON_Q4_1_GGUF, "llama_cpp"),
        "llama-server-lora": Runner("peers.llama_server", ON_BF16_GGUF, "llama_cpp"),
        "openvino-q4_1": Runner("peers.openvino", ON_Q4_1_GGUF, "openvino"),
        "vllm": Runner("peers.vllm_cpu", BF16, "vllm_cpu"),
        "vllm-lora": Runner("peers.vllm_cpu", (*BF16, "--lora"), "vllm_cpu"),
    }
)
"""By name, as rows and reports know them."""
