"""How the bytes of a GGUF tensor become values: plain floats, or llama.cpp's blocks of quantised weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motet.kernels.ops import BLOCK_KINDS, Blocks
from motet.runtime.models.checkpoint import StoredTensor

_BLOCKS_AT_A_TIME = 8192
"""Large enough for NumPy to let other threads run, small enough for a core's cache."""


def stored_tensor(tensor: gguf.ReaderTensor, restore: Callable[[Tensor], Tensor] | None) -> StoredTensor:
    """A tensor of the file. restore: undoes what llama.cpp's converter did to its values: to those of a matrix, it
    moved whole rows."""
    dtype = tensor.tensor_type.name
    shape = tuple(map(int, reversed(tensor.shape)))
    raw = np.asarray(tensor.data).reshape(-1).view(np.uint8)

    def read() -> Tensor:
        values = READERS[dtype](raw).view(shape)
        return values if restore is None else restore(values)

    if len(shape) != 2 or dtype not in BLOCK_KINDS:
        return StoredTensor(dtype, shape, raw, read)

    def blocks() -> Blocks:
        rows = torch.from_numpy(raw).view(shape[0], -1)
        return Blocks(dtype, shape[1], rows if restore is None else restore(rows))

    return StoredTensor(dtype, shape, raw, read, blocks)


def _plain(dtype: torch.dtype) -> Callable[[npt.NDArray[np.uint8]], Tensor]:
    return lambda raw: torch.from_numpy(raw).view(dtype)


def _quantised(blocks: Any) -> Callable[[npt.NDArray[np.uint8]], Tensor]:
    """Upstream's arithmetic on one block format, in pieces that threads share."""

    def read(raw: npt.NDArray[np.uint8]) -> Tensor:
        packed = raw.reshape(-1, blocks.type_size)
        values = np.empty((packed.shape[0], blocks.block_size), dtype=np.float32)

        def fill(first: int) -> None:
            part = slice(first, first + _BLOCKS_AT_A_TIME)
            values[part] = blocks.dequantize_blocks(packed[part])

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="motet-load") as pool:
            list(pool.map(fill, range(0, len(packed), _BLOCKS_AT_A_TIME)))
        return torch.from_numpy(values)

    return read


READERS: Mapping[str, Callable[[npt.NDArray[np.uint8]], Tensor]] = MappingProxyType(
    {
        "F32": _plain(torch.float32),
        "F16": _plain(torch.float16),
        "BF16": _plain(torch.bfloat16),
        "Q8_0": _quantised(gguf.quants.Q8_0),
        "Q4_0": _quantised(gguf.quants.Q4_0),
        "Q4_1": _quantised(gguf.quants.Q4_1),
        "Q5_0": _quantised(gguf.quants.Q5_0),
        "Q5_1": _quantised(gguf.quants.Q5_1),
        "Q4_K": _quantised(gguf.quants.Q4_K),
        "Q5_K": _quantised(gguf.quants.Q5_K),
        "Q6_K": _quantised(gguf.quants.Q6_K),
    }
)
"""By the name of the tensor type: all of a tensor's bytes -> its values, in their order."""
