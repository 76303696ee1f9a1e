"""The CPU backend's builds: each test of an op runs on every one that this processor can use and that differs in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from motet.kernels.cpu.library import open_library, usable_isas
from motet.kernels.cpu.memory import HugePages
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.ops import Quantization

MakeOps = Callable[..., CpuOps]


BUILDS: list[Any] = list(usable_isas()) or [
    pytest.param("none", marks=pytest.mark.skip("no C++ compiler at installation"))
]

FLOAT_BUILDS = [isa for isa in BUILDS if isa != "avx512" or "avx512_vnni" not in BUILDS]
"""Where no bytes are multiplied, the two builds for AVX-512 are the same machine code: see `test_library.py`."""


def poisoned(_: HugePages, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.empty gives, and weights, caches and adapters get, is full of NaN and of the largest integers."""
    monkeypatch.setattr(HugePages, "empty", poisoned)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=FLOAT_BUILDS)
def isa(request: pytest.FixtureRequest) -> str:
    """Tests of products of bytes have a fixture of their own, over all BUILDS."""
    return str(request.param)


@pytest.fixture
def make_ops(isa: str) -> MakeOps:
    """make_ops(dtype=float32, threads=2, quantization=None): the backend on the build under test."""

    def make(
        dtype: torch.dtype = torch.float32, threads: int = 2, quantization: Quantization | None = None
    ) -> CpuOps:
        return CpuOps(*open_library(isa), dtype, threads, quantization)

    return make


def untouched(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that take address space alone: the system gives memory to what is written."""
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Network:
    """Logits [T, columns] of ids, token by token: an embedding and linears one behind another."""

    def __init__(self, ops: CpuOps, *, vocab: int = 50, hidden: int = 24, columns: int = 7) -> None:
        noise = torch.Generator().manual_seed(0)
        self.ops = ops
        self._table = ops.pack_table(torch.randn(vocab, hidden, generator=noise))
        weights = (torch.randn(hidden, hidden, generator=noise) / hidden**0.5 for _ in range(8))
        self._weights = [ops.pack_linear(weight) for weight in weights]
        self._head = ops.pack_linear(torch.randn(columns, hidden, generator=noise))

    def __call__(self, ids: Tensor) -> Tensor:
        x = self.ops.embedding(ids, self._table)
        for weight in self._weights:
            x = self.ops.linear(x, weight)
        return self.ops.linear(x, self._head)
