"""Linears of activations that are rounded to bf16, for processors that multiply pairs of it; what those processors
compute is emulated on all others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motet.kernels.cpu.library import NATIVE_BF16, open_library
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.cpu.weights import PackedWeight
from tests.kernels.cpu.test_linear import SHAPES, random

bf16 = torch.bfloat16


def bf16_ops(isa: str, threads: int = 2) -> CpuOps:
    """The backend as it is on the build for such processors, on the library of the build under test."""
    return CpuOps(NATIVE_BF16, open_library(isa)[1], bf16, threads)


@SHAPES
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_dense_product_of_rounded_activations(
    isa: str, shape: tuple[int, int], bias: bool
) -> None:
    columns, inner = shape
    ops = bf16_ops(isa)
    x, weight = random(61, inner), random(columns, inner, dtype=bf16, seed=1)
    b = random(columns, seed=2) if bias else None
    expected = x.to(bf16).double() @ weight.double().T + (b.double() if b is not None else 0.0)
    actual = ops.linear(x, ops.pack_linear(weight), b)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5 * inner**0.5)


@SHAPES
def test_a_row_is_the_same_bits_in_any_company(isa: str, shape: tuple[int, int]) -> None:
    columns, inner = shape
    ops = bf16_ops(isa)
    x = random(130, inner)
    packed = ops.pack_linear(random(columns, inner, dtype=bf16, seed=1))
    together = ops.linear(x, packed)
    for rows in (0, 1, 2, 3, 5, 12, 13, 25, 64):
        assert torch.equal(ops.linear(x[:rows], packed), together[:rows])
    assert torch.equal(bf16_ops(isa, threads=1).linear(x, packed), together)


def test_each_pair_is_two_multiply_adds_the_odd_one_first(isa: str) -> None:
    if isa == NATIVE_BF16:
        pytest.skip("the processor answers for itself")
    ops = bf16_ops(isa)
    # Of sizes whose sums float64 holds exactly, and float32 rounds again and again.
    x, weight = random(40, 300).to(bf16), random(33, 300, dtype=bf16, seed=1)
    x = torch.where(x.abs() < 2**-7, 1, x)
    weight = torch.where(weight.abs() < 2**-7, 1, weight)
    expected = torch.zeros(40, 33)
    for even in range(0, 300, 2):
        for k in (even + 1, even):
            product = x[:, k, None].double() * weight[:, k].double()
            expected = (expected.double() + product).float()
    assert torch.equal(ops.linear(x.float(), ops.pack_linear(weight)), expected)


@pytest.mark.parametrize("inner", [1, 32, 47])
def test_activations_are_rounded_to_nearest_halves_to_even(isa: str, inner: int) -> None:
    ops = bf16_ops(isa)
    numbers = torch.randint(-(1 << 31), 1 << 31, (4000,), generator=torch.Generator().manual_seed(0))
    halves = torch.tensor([1.0, 1.0078125, -3.0]) * (1 + 2**-8)
    x = torch.cat([numbers.to(torch.int32).view(torch.float32), halves])
    x = x[x.isfinite() & (x.abs() >= 2**-126) & (x.abs() < 3e38)]
    x = x[: len(x) // inner * inner].view(-1, inner)
    y = ops.linear(x, ops.pack_linear(torch.eye(inner, dtype=bf16)))
    assert torch.equal(y, x.to(bf16).float())


@pytest.mark.parametrize("inner", [1, 32])
def test_what_is_not_finite_stays_so(isa: str, inner: int) -> None:
    ops = bf16_ops(isa)
    infinity, largest = float("inf"), torch.finfo(torch.float32).max
    all_ones = torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(
        torch.float32
    )  # NaN that rounding would carry away
    x = torch.cat([torch.tensor([infinity, -infinity, largest, float("nan")]), all_ones])
    y = ops.linear(x[:, None].repeat(1, inner), ops.pack_linear(torch.ones(1, inner, dtype=bf16)))[:, 0]
    assert torch.equal(y[:3], torch.tensor([infinity, -infinity, infinity]))
    assert y[3:].isnan().all()


def test_subnormal_numbers_count_as_nothing(isa: str) -> None:
    ops = bf16_ops(isa)
    subnormal = torch.full((1, 2), 2.0**-127, dtype=bf16)
    assert ops.linear(torch.full((1, 2), 2.0**100), ops.pack_linear(subnormal)).item() == 0
    assert ops.linear(subnormal.float(), ops.pack_linear(torch.ones(1, 2, dtype=bf16))).item() == 0
    tiny = torch.full((1, 2), 2.0**-64, dtype=bf16)
    assert ops.linear(tiny.float(), ops.pack_linear(tiny)).item() == 0
    assert ops.linear(2 * tiny.float(), ops.pack_linear(2 * tiny)).item() == 2.0**-125


def test_not_a_number_stays_in_its_row_and_memory_that_is_not_used_is_not_read(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = PackedWeight.scratch
    monkeypatch.setattr(
        PackedWeight, "scratch", lambda packed, rows: scratch(packed, rows).fill_(float("nan"))
    )
    ops = bf16_ops(isa)
    x, packed = random(30, 41), ops.pack_linear(random(50, 41, dtype=bf16, seed=1))
    sound = ops.linear(x, packed)
    assert sound.isfinite().all()
    x[7] = float("nan")
    y = ops.linear(x, packed)
    assert y[7].isnan().all()
    y[7] = sound[7]
    assert torch.equal(y, sound)


def test_a_recorded_linear_rounds_again(isa: str) -> None:
    ops = bf16_ops(isa)
    packed = ops.pack_linear(random(33, 40, dtype=bf16))
    x = random(3, 40, seed=1)

    def step() -> Tensor:
        return ops.linear(x, packed)

    replay = ops.record(step, [x])
    assert replay is not None
    other = random(3, 40, seed=2)
    assert torch.equal(replay([other]), ops.linear(other, packed))
