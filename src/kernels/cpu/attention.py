"""Paged keys and values, and the plan of a step's attention, as `kv.h` and `attention.cpp` read them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.kernels.cpu.memory import HugePages
from motet.kernels.cpu.weights import FORMATS

TILE = 16
"""Tokens that stand together in the cache; a block is padded to whole tiles, a head to whole 16 dimensions."""


@dataclass(frozen=True)
class PagedKV:
    """One layer's cache; the system gives its memory as it is first written."""

    format: str  # "f32" or "bf16"
    data: Tensor  # [blocks, KV heads, tiles of a block, K and V of a tile]
    num_kv_heads: int
    head_dim: int
    block_size: int

    @classmethod
    def empty(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        memory: HugePages,
    ) -> PagedKV:
        tiles, width = -(-block_size // TILE), -(-head_dim // TILE) * TILE
        shape = (num_blocks, num_kv_heads, tiles, 2 * TILE * width)
        data = memory.empty(math.prod(shape), dtype).view(shape)
        return cls(FORMATS[dtype], data, num_kv_heads, head_dim, block_size)

    @property
    def block_bytes(self) -> int:
        return self.data.stride(0) * self.data.itemsize


@dataclass(frozen=True)
class PagedAttentionPlan:
    """A step's sequences. The library reaches them through `header`, so that its address is all that an op is given."""

    header: Tensor  # `Plan` of attention.cpp: numbers and addresses, int64
    tensors: tuple[Tensor, ...]  # what the header points to

    @classmethod
    def of(
        cls,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        block_size: int,
        window: int | None,
    ) -> PagedAttentionPlan:
        tensors = (cu_seqlens_q.contiguous(), seq_lens.contiguous(), block_tables.contiguous())
        addresses = [x.data_ptr() for x in tensors]
        header = torch.tensor([*block_tables.shape, block_size, window or 0, *addresses])
        return cls(header, tensors)
