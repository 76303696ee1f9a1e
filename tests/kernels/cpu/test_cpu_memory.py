"""Tests for the memory of packed weights and caches."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.cpu.memory import ALIGNMENT, CHUNK, HugePages


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here: these tests are about the memory itself."""


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


def flags_of(tensor: torch.Tensor) -> list[str]:
    """What the system says of the memory that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head:
            first, last = (int(word, 16) for word in head.split("-"))
            inside = first <= tensor.data_ptr() < last
        elif inside and head == "VmFlags:":
            return rest
    raise AssertionError("the tensor lies nowhere")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' own account of its memory")
@pytest.mark.parametrize("size", [1 << 20, 2 * CHUNK])
def test_memory_is_for_huge_pages_and_no_forked_child_writes_into_it(size: int) -> None:
    flags = flags_of(HugePages().empty(size, torch.uint8).zero_())
    assert "hg" in flags
    assert "sh" not in flags


@pytest.mark.parametrize("size", [1 << 20, 2 * CHUNK])
def test_memory_goes_back_with_the_last_tensor(size: int) -> None:
    memory, process = HugePages(), psutil.Process()
    before = process.memory_info().rss
    tensors = [memory.empty(size, torch.uint8).zero_() for _ in range(4 * CHUNK // size)]
    assert process.memory_info().rss - before > 3 * CHUNK
    del tensors, memory
    gc.collect()
    assert process.memory_info().rss - before < CHUNK
