"""What this machine can do at most, with the threads and the vectors of the native library's ops.

    python -m benchmarks.ceiling [--threads 2] [--rounds 9]

Read: the sum of 512 MiB of float32 that no cache holds, in huge pages. Operations: multiply-adds in registers alone,
as float32 and of bytes into int32. Each is the best of all rounds: on a shared machine the
others show the neighbours. Of bf16 there is one where the processor multiplies it; elsewhere bf16 weights become
float32 before they are multiplied, so their ceiling is float32's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from benchmarks.common import PHYSICAL_CORES, MiB, make_parser, report

from motet.kernels.cpu.library import NATIVE_BF16, Threads, open_library
from motet.kernels.cpu.memory import HugePages

READ_BYTES = 512 * MiB
BLOCK = 1 << 15  # floats whose sum is one number, as in ceiling.cpp
PARTS, STEPS = 64, 10_000  # a quarter of a billion operations in float32, and more of narrower numbers


class Ceiling:
    """Measures when it is asked, so that a benchmark can put a measurement beside each of its own."""

    def __init__(self, threads: int, isa: str | None = None) -> None:
        self.isa, self._library = open_library(isa)
        self._threads = Threads(self._library, threads)
        self._numbers = HugePages().empty(READ_BYTES // 4, torch.float32).fill_(1).numpy()
        self._sums = np.empty(max(PARTS, self._numbers.size // BLOCK), np.float32)
        self._operations = np.zeros(1, np.int64)

    def kind_of_linears(self, dtype: str, quantization: str | None) -> str:
        """The kind of their operations."""
        if quantization is not None:
            return "int8"
        return "bf16" if dtype == "bfloat16" and self.isa == NATIVE_BF16 else "f32"

    def read_bytes_per_s(self) -> float:
        sums = self._sums
        seconds = seconds_of(
            lambda: self._library.motet_ceiling_read(
                self._threads.handle, self._numbers.ctypes.data, self._numbers.size, sums.ctypes.data
            )
        )
        assert np.all(sums[: self._numbers.size // BLOCK] == BLOCK), "it did not read all"
        return READ_BYTES / seconds

    def operations_per_s(self, kind: str) -> float:
        """kind: f32, bf16 (where the processor multiplies it) or int8. A multiply-add is two operations."""
        function = getattr(self._library, f"motet_ceiling_{kind}")
        arguments = self._threads.handle, PARTS, STEPS, self._sums.ctypes.data, self._operations.ctypes.data
        seconds = seconds_of(lambda: function(*arguments))
        return float(self._operations[0]) / seconds


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=PHYSICAL_CORES)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    ceiling = Ceiling(arguments.threads)
    rounds = range(arguments.rounds)
    native = {}
    if ceiling.isa == NATIVE_BF16:
        native["bf16_gflop_per_s"] = max(ceiling.operations_per_s("bf16") for _ in rounds) / 1e9
    report(
        f"{ceiling.isa}, {arguments.threads} threads",
        "ceiling",
        read_gb_per_s=max(ceiling.read_bytes_per_s() for _ in rounds) / 1e9,
        f32_gflop_per_s=max(ceiling.operations_per_s("f32") for _ in rounds) / 1e9,
        int8_gop_per_s=max(ceiling.operations_per_s("int8") for _ in rounds) / 1e9,
        **native,
    )


if __name__ == "__main__":
    main()
