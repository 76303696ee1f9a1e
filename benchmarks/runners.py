"""Who is compared: each runner's module, what it can do, and the environment that it runs in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.common import BF16_GGUF, INSTALLED, PEERS_FOLDER, Q4_1_GGUF

ALL = ("w1", "w2", "w3", "w3b64", "w4", "w5")
BASE = ("w1", "w2", "w4", "w5")


class Runner(NamedTuple):
    module: str
    loads: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: str | None = None  # below PEERS_FOLDER; None: ours
    by_default: bool = True

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
ON_BF16_GGUF = ("--model", str(BF16_GGUF))
ON_Q4_1_GGUF = ("--model", str(Q4_1_GGUF))

RUNNERS: Mapping[str, Runner] = MappingProxyType(
    {
        "motet-bf16": Runner("engine", ALL, BF16),
        "motet-int8": Runner("engine", ALL, (*BF16, "--quantization", "int8")),
        "motet-int4": Runner("engine", BASE, (*BF16, "--quantization", "int4")),
        "motet-f32": Runner("engine", BASE, by_default=False),
        "transformers": Runner("peers.transformers_static", ("w1", "w2"), BF16),
        "transformers-f32": Runner("peers.transformers_static", ("w1", "w2"), by_default=False),
        "transformers-continuous": Runner("peers.transformers_continuous", BASE, BF16, by_default=False),
        "llama-cpp-bf16": Runner("peers.llama_cpp", ("w1",), ON_BF16_GGUF, "llama_cpp"),
        "llama-cpp-q4_1": Runner("peers.llama_cpp", ("w1",), ON_Q4_1_GGUF, "llama_cpp"),
        "openvino-q4_1": Runner("peers.openvino", ("w1", "w2", "w4"), ON_Q4_1_GGUF, "openvino"),
        "vllm": Runner("peers.vllm_cpu", BASE, BF16, "vllm_cpu"),
        "vllm-lora": Runner("peers.vllm_cpu", ("w3", "w3b64"), (*BF16, "--lora"), "vllm_cpu"),
    }
)
"""By name, as reports and ratios know them."""
