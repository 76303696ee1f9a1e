"""What the ceilings are measured with does what it is timed for."""

from __future__ import annotations

import numpy as np
import pytest

from motet.kernels.cpu.library import Threads, open_library
from tests.kernels.cpu.conftest import BUILDS

BLOCK = 1 << 15


@pytest.fixture(params=BUILDS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_reading_sums_every_float_of_each_block(isa: str) -> None:
    _, library = open_library(isa)
    x = np.random.default_rng(0).random(3 * BLOCK, np.float32)
    sums = np.zeros(3, np.float32)
    threads = Threads(library, 2)  # they live as long as this name
    library.motet_ceiling_read(threads.handle, x.ctypes.data, x.size, sums.ctypes.data)
    assert sums == pytest.approx(x.reshape(3, BLOCK).sum(axis=1, dtype=np.float64), rel=1e-5)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
def test_operations_are_counted_by_parts_and_steps(isa: str, kind: str) -> None:
    _, library = open_library(isa)
    function = getattr(library, f"motet_ceiling_{kind}")
    threads = Threads(library, 2)
    sums, operations = np.zeros(5, np.float32), np.zeros(1, np.int64)

    def count(parts: int, steps: int) -> int:
        function(threads.handle, parts, steps, sums.ctypes.data, operations.ctypes.data)
        return int(operations[0])

    assert count(5, 7) == 35 * count(1, 1) > 0
