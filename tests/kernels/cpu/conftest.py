"""The CPU backend's builds: each test of an op runs on every one that this processor can use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from motet.kernels.cpu.library import open_library, usable_isas
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.ops import Quantization

MakeOps = Callable[..., CpuOps]


@pytest.fixture(
    params=usable_isas() or [pytest.param("none", marks=pytest.mark.skip("no C++ compiler at installation"))]
)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_ops(isa: str) -> MakeOps:
    """make_ops(dtype=float32, threads=2, quantization=None): the backend on the build under test."""

    def make(
        dtype: torch.dtype = torch.float32, threads: int = 2, quantization: Quantization | None = None
    ) -> CpuOps:
        return CpuOps(*open_library(isa), dtype, threads, quantization)

    return make
