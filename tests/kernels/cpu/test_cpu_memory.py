"""Tests for the memory of packed weights and caches."""

from __future__ import annotations

import gc
from itertools import pairwise

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.cpu.memory import ALIGNMENT, CHUNK, HugePages

SIZES = st.lists(st.integers(0, 5000) | st.sampled_from([CHUNK // 2, CHUNK // 2 + 1, CHUNK + 7]), max_size=12)


@given(sizes=SIZES, dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
@settings(deadline=None, max_examples=50)
def test_tensors_are_aligned_and_share_no_byte(sizes: list[int], dtype: torch.dtype) -> None:
    memory = HugePages()
    tensors = [memory.empty(size, dtype) for size in sizes]
    assert [len(tensor) for tensor in tensors] == sizes
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in tensors if t.numel())
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("size", [1 << 20, 2 * CHUNK])
def test_memory_goes_back_with_the_last_tensor(size: int) -> None:
    memory, process = HugePages(), psutil.Process()
    before = process.memory_info().rss
    tensors = [memory.empty(size, torch.uint8).zero_() for _ in range(4 * CHUNK // size)]
    assert process.memory_info().rss - before > 3 * CHUNK
    del tensors, memory
    gc.collect()
    assert process.memory_info().rss - before < CHUNK
