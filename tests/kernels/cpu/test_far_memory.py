"""What lies further than 32 bits reach is found."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.cpu.attention import PagedKV
from motet.kernels.cpu.weights import PackedWeight
from motet.kernels.ops import Quantization
from tests.kernels.cpu.conftest import BUILDS, MakeOps, untouched

FAR = 1 << 31
"""Elements: an int32 ends before."""

COLUMNS = 48
"""Whole panels of every build."""

FORMATS: list[tuple[torch.dtype, Quantization | None]] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, "int8"),
    (torch.float32, "int4"),
]


def behind(inner: int, small: PackedWeight) -> PackedWeight:
    """A weight of zeros whose last COLUMNS are `small` [COLUMNS, inner]."""
    size = small.data.numel()
    times = -(-FAR // size) + 2
    data = untouched(times * size, dtype=small.data.dtype)
    data[-size:] = small.data
    scales = small.scales
    if scales is not None:
        scales = torch.zeros(times * COLUMNS)
        scales[-COLUMNS:] = small.scales
    return PackedWeight(small.format, data, times * COLUMNS, inner, scales, small.group)


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS[:3])
def test_rows_of_a_table(make_ops: MakeOps, dtype: torch.dtype, quantization: Quantization | None) -> None:
    ops = make_ops(dtype, quantization=quantization)
    small = ops.pack_table(torch.randn(COLUMNS, 4096).to(dtype))
    far = behind(4096, small)
    ids = torch.tensor([0, COLUMNS - 1, 7])
    assert torch.equal(ops.embedding(ids + far.columns - COLUMNS, far), ops.embedding(ids, small))


@pytest.mark.parametrize("isa", BUILDS[:1], indirect=True)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS[1:])
def test_panels_of_a_weight(make_ops: MakeOps, dtype: torch.dtype, quantization: Quantization | None) -> None:
    """All of them are read, so one build is enough: they differ in their vectors alone."""
    ops = make_ops(dtype, quantization=quantization)
    x = torch.randn(1, 1 << 16)
    small = ops.pack_linear(torch.randn(COLUMNS, 1 << 16).to(dtype))
    y = ops.linear(x, behind(1 << 16, small))
    assert torch.equal(y[:, -COLUMNS:], ops.linear(x, small))


def test_blocks_to_copy(make_ops: MakeOps) -> None:
    ops = make_ops(torch.bfloat16)
    blocks = FAR // (2 * 16 * 256) + 3
    data = untouched(blocks, 1, 1, 2 * 16 * 256, dtype=torch.bfloat16)
    kv = PagedKV("bf16", data, 1, 256, 16)
    data[-1], data[1] = 3.0, 5.0
    ops.copy_kv_blocks(kv, torch.tensor([blocks - 1, 1]), torch.tensor([0, blocks - 2]), 16)
    assert (data[0] == 3).all() and (data[-2] == 5).all() and not data[2].any()


def test_rows_of_activations(make_ops: MakeOps) -> None:
    ops = make_ops()
    x = untouched(3, FAR // 2 + 64)
    x[2, -64:], x[2, :64] = torch.randn(64), 7.0
    weight, before = torch.rand(64), x[2, -64:].clone()
    ops.rms_norm_heads(x, x.shape[1] - 64, x.shape[1], weight, 1e-6)
    assert torch.equal(x[2, -64:], ops.rms_norm(before, weight, 1e-6))
    assert (x[2, :64] == 7).all()
    narrow = x.view(-1, 64)
    rows = torch.tensor([len(narrow) - 1, 0])
    assert torch.equal(ops.take_rows(narrow, rows), narrow[rows])


@pytest.mark.parametrize("isa", BUILDS[:1], indirect=True)
def test_rows_of_logits(make_ops: MakeOps) -> None:
    """All of them are read, so one build is enough: they differ in their vectors alone."""
    logits = untouched(FAR // (1 << 20) + 2, 1 << 20)
    logits[-1, 77], logits[-2, 0] = 1.0, float("nan")
    ids, finite = make_ops().greedy(logits)
    assert (int(ids[-1]), int(ids[0])) == (77, 0)
    assert finite.tolist() == [True] * (len(logits) - 2) + [False, True]
