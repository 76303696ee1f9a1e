"""Packed linears and embeddings in float32 and bf16, against products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu.conftest import MakeOps

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize(
    "shape",
    [(1, 1), (7, 1), (23, 2), (48, 37), (49, 64), (96, 255), (70, 256), (100, 257), (64, 769), (25, 1541)],
    ids=str,
)
"""(N, K): around whole panels (of 48, 24 or 12 columns), pairs of K, and the 256 or 768 K that are kept in cache."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@SHAPES
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_dense_product(
    make_ops: MakeOps, dtype: torch.dtype, shape: tuple[int, int], bias: bool
) -> None:
    columns, inner = shape
    ops = make_ops(dtype)
    # Where a processor multiplies bf16, x is rounded to it.
    x, weight = random(61, inner, dtype=dtype).float(), random(columns, inner, dtype=dtype, seed=1)
    b = random(columns, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (b.double() if b is not None else 0.0)
    actual = ops.linear(x, ops.pack_linear(weight), b)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5 * inner**0.5)


@DTYPES
@SHAPES
def test_a_row_of_linear_is_the_same_bits_in_any_company(
    make_ops: MakeOps, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    columns, inner = shape
    ops, alone = make_ops(dtype), make_ops(dtype, threads=1)
    x = random(130, inner)
    packed = ops.pack_linear(random(columns, inner, dtype=dtype, seed=1))
    together = ops.linear(x, packed)
    for rows in (0, 1, 2, 3, 5, 12, 13, 25, 64):
        assert torch.equal(ops.linear(x[:rows], packed), together[:rows])
    assert torch.equal(alone.linear(x, packed), together)


@DTYPES
@SHAPES
def test_packing_loses_nothing(make_ops: MakeOps, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    ops = make_ops(dtype)
    weight = random(*shape, dtype=dtype)
    assert torch.equal(ops.unpack_linear(ops.pack_linear(weight)), weight)


@DTYPES
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [(96, 192, 7), (3,)], ids=str)
def test_weights_under_each_other_are_packed_as_if_they_were_one_in_the_backends_dtype(
    make_ops: MakeOps, dtype: torch.dtype, stored: torch.dtype, columns: tuple[int, ...]
) -> None:
    ops = make_ops(dtype)
    weights = [random(n, 83, dtype=stored, seed=n) for n in columns]
    assert ops.packs(weights)
    assert torch.equal(ops.unpack_linear(ops.pack_linear(*weights)), torch.cat(weights).to(dtype))


@DTYPES
def test_a_weight_that_is_a_view_is_packed_as_it_is_seen(make_ops: MakeOps, dtype: torch.dtype) -> None:
    ops = make_ops(dtype)
    weight = random(40, 30, dtype=dtype).t()
    assert torch.equal(ops.unpack_linear(ops.pack_linear(weight)), weight)


def test_rows_that_are_a_view_are_taken_as_they_are_seen(make_ops: MakeOps) -> None:
    ops = make_ops()
    x, weight = random(40, 9).t(), random(33, 40, seed=1)
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), x @ weight.T)


@DTYPES
def test_embedding_picks_rows_of_the_table(make_ops: MakeOps, dtype: torch.dtype) -> None:
    ops = make_ops(dtype)
    table = random(101, 33, dtype=dtype)
    ids = torch.tensor([100, 0, 100, 32])
    assert torch.equal(ops.embedding(ids, ops.pack_table(table)), table[ids].float())
    assert ops.embedding(ids[:0], ops.pack_table(table)).shape == (0, 33)


def test_not_a_number_stays_in_its_row(make_ops: MakeOps) -> None:
    ops = make_ops()
    x, packed = random(30, 40), ops.pack_linear(random(50, 40, seed=1))
    sound = ops.linear(x, packed)
    x[7] = float("nan")
    y = ops.linear(x, packed)
    assert y[7].isnan().all()
    y[7] = sound[7]
    assert torch.equal(y, sound)
