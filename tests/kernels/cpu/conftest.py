"""The CPU backend's builds: each test of an op runs on every one that this processor can use and that differs in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from motet.kernels.cpu.library import open_library, usable_isas
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.ops import Quantization

MakeOps = Callable[..., CpuOps]


BUILDS: list[Any] = list(usable_isas()) or [
    pytest.param("none", marks=pytest.mark.skip("no C++ compiler at installation"))
]

FLOAT_BUILDS = [isa for isa in BUILDS if isa != "avx512" or "avx512_vnni" not in BUILDS]
"""Where no bytes are multiplied, the two builds for AVX-512 are the same machine code: see `test_library.py`."""


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
