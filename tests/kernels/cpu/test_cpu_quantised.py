"""Quantised linears and tables, against their formulas in torch, bit by bit where these are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from motet.errors import ModelError
from motet.kernels.cpu import library as library_module
from motet.kernels.ops import select_ops
from motet.kernels.reference import ReferenceOps
from tests.kernels.cpu.conftest import MakeOps

SHAPES = [(1, 1), (3, 5), (32, 64), (33, 65), (31, 127), (70, 96), (64, 576), (130, 200)]
"""N, K: whole panels, quads and groups, and all that is not."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What torch.empty gives is full of NaN and of the largest integers."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x as whole numbers and a scale."""
    most = x.abs().amax(1, keepdim=True)
    q = torch.round(x * torch.where(most > 0, torch.tensor(127.0) / most, 0))
    return q, most * (torch.tensor(1.0) / 127)


def int8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (xq, x_scale), (wq, w_scale) = rounded(x), rounded(weight.float())
    dots = (xq.double() @ wq.double().t()).float()
    y = dots * (x_scale * w_scale.t())
    return y if bias is None else y + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_int8_linear_is_its_formula_to_the_bit_in_every_build(
    make_ops: MakeOps, columns: int, inner: int, dtype: torch.dtype
) -> None:
    ops = make_ops(dtype, quantization="int8")
    torch.manual_seed(columns)
    weight, bias = torch.randn(columns, inner).to(dtype), torch.randn(columns)
    packed = ops.pack_linear(weight.clone())
    for rows in (0, 1, 2, 5, 12, 13, 31):
        x = torch.randn(rows, inner) * torch.rand(rows, 1) * 10
        assert torch.equal(ops.linear(x, packed), int8_product(x, weight, None))
        assert torch.equal(ops.linear(x, packed, bias), int8_product(x, weight, bias))


def test_int8_linear_is_near_the_unquantised_one(make_ops: MakeOps) -> None:
    ops, reference = make_ops(quantization="int8"), ReferenceOps(torch.device("cpu"), torch.float32)
    weight, x = torch.randn(100, 576), torch.randn(20, 576)
    y, exact = ops.linear(x, ops.pack_linear(weight)), reference.linear(x, weight)
    assert (y - exact).norm() < 0.015 * exact.norm()


@pytest.mark.parametrize(("columns", "inner"), [(33, 65), (320, 576)])
def test_a_row_does_not_depend_on_its_company_or_on_threads(
    make_ops: MakeOps, columns: int, inner: int
) -> None:
    one, two = make_ops(threads=1, quantization="int8"), make_ops(threads=2, quantization="int8")
    weight = one.pack_linear(torch.randn(columns, inner))
    x = torch.randn(64, inner)
    alone = torch.cat([one.linear(row[None], weight) for row in x])
    for rows in (2, 3, 7, 12, 13, 25, 40, 64):
        for ops in (one, two):
            assert torch.equal(ops.linear(x[-rows:], weight), alone[-rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_unpacking_and_embedding_give_what_the_codes_stand_for(
    make_ops: MakeOps, columns: int, inner: int, dtype: torch.dtype
) -> None:
    ops = make_ops(dtype, quantization="int8")
    weight = torch.randn(columns, inner).to(dtype)
    packed = ops.pack_table(weight.clone())
    q, scale = rounded(weight.float())
    assert torch.equal(ops.unpack_linear(packed), (q * scale).to(dtype))
    ids = torch.randint(columns, (7,))
    assert torch.equal(ops.embedding(ids, packed), (q * scale)[ids])
    assert ops.embedding(ids[:0], packed).shape == (0, inner)


def test_what_is_not_finite_makes_its_own_row_nan(make_ops: MakeOps) -> None:
    ops = make_ops(quantization="int8")
    weight = ops.pack_linear(torch.randn(40, 50))
    x = torch.randn(5, 50)
    expected = ops.linear(x, weight)
    x[1, 49], x[3, 0] = torch.nan, -torch.inf
    y = ops.linear(x, weight)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-35, 3e36])
def test_rows_and_weights_of_any_size(make_ops: MakeOps, size: float) -> None:
    ops = make_ops(quantization="int8")
    ones = torch.ones(3, 50)
    for x, weight in ((ones, ones * size), (ones * size, ones)):
        y = ops.linear(x, ops.pack_linear(weight))
        torch.testing.assert_close(y, torch.full((3, 3), 50 * size), rtol=1e-5, atol=1e-28)


def test_a_recorded_product_can_be_made_again(make_ops: MakeOps) -> None:
    ops = make_ops(quantization="int8")
    weight = ops.pack_linear(torch.randn(40, 50))
    ids = torch.tensor([3, 39])

    def step() -> Tensor:
        return ops.linear(ops.embedding(ids, weight), weight)

    expected = step()
    replay = ops.record(step, [ids])
    assert replay is not None
    assert torch.equal(replay([ids.clone()]), expected)
    assert torch.equal(replay([ids.flip(0)]), expected.flip(0))


def test_quantisation_without_the_native_library_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "usable_isas", list)
    monkeypatch.delenv(library_module.ISA_VARIABLE, raising=False)
    with pytest.raises(ModelError, match="quantization is 'int8', which needs the native library"):
        select_ops("cpu", "float32", quantization="int8")
