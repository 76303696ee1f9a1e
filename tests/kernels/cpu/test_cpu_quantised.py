"""Quantised linears and tables, against their formulas in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motet.errors import ModelError
from motet.kernels.cpu import library as library_module
from motet.kernels.cpu import ops as ops_module
from motet.kernels.cpu.library import open_library
from motet.kernels.cpu.weights import PackedWeight
from motet.kernels.ops import Quantization, select_ops
from motet.kernels.reference import ReferenceOps
from tests.kernels.cpu.conftest import BUILDS, MakeOps

SHAPES = pytest.mark.parametrize(
    ("columns", "inner"), [(1, 1), (3, 5), (48, 64), (49, 65), (23, 127), (70, 96), (64, 576), (130, 200)]
)
"""N, K: whole panels, quads and groups, and all that is not."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
FORMATS: list[tuple[Quantization, int]] = [("int8", 64), ("int4", 64), ("int4", 32)]
QUANTISED = pytest.mark.parametrize(("quantization", "group"), FORMATS)
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 31)
"""Of activations: around the tiles of every build."""


@pytest.fixture(params=BUILDS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test's size, where it says one."""
    params = getattr(request.node, "callspec", None)
    if params is not None and "group" in params.params:
        monkeypatch.setattr(ops_module, "INT4_GROUP", params.params["group"])


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x [R, n] as whole numbers and a scale."""
    most = x.abs().amax(1, keepdim=True)
    q = torch.round(x * torch.where(most > 0, torch.tensor(127.0) / most, 0))
    return q, most * (torch.tensor(1.0) / 127)


def check_product(y: Tensor, x: Tensor, weight: Tensor, group: int) -> None:
    """y is x · weightᵀ with x in 8 bits, a scale for each group of K, up to the rounding of a few float sums."""
    terms = []
    for begin in range(0, x.shape[1], group):
        q, scale = rounded(x[:, begin : begin + group])
        terms.append((q * scale.double(), weight[:, begin : begin + group].double()))
    exact = sum(a @ b.t() for a, b in terms)
    size = sum(a.abs() @ b.abs().t() for a, b in terms)
    assert ((y - exact).abs() <= 2e-6 * size).all()


@QUANTISED
@DTYPES
@SHAPES
def test_a_product_is_that_of_its_rounded_factors(
    make_ops: MakeOps, quantization: Quantization, group: int, columns: int, inner: int, dtype: torch.dtype
) -> None:
    ops = make_ops(dtype, quantization=quantization)
    torch.manual_seed(columns)
    packed = ops.pack_linear(torch.randn(columns, inner).to(dtype))
    weight, bias = make_ops(quantization=quantization).unpack_linear(packed), torch.randn(columns)
    for rows in ROWS:
        x = torch.randn(rows, inner) * torch.rand(rows, 1) * 10
        y = ops.linear(x, packed)
        assert y.shape == (rows, columns)
        check_product(y, x, weight, group)
        assert torch.equal(ops.linear(x, packed, bias), y + bias)


def test_products_of_bytes_are_the_same_integers_in_every_build(make_ops: MakeOps) -> None:
    ops = make_ops(quantization="int8")
    x, weight = torch.randn(13, 64), torch.randn(40, 64)
    x[0], weight[0] = 1.0, 1.0  # the largest sums
    x[1], weight[1] = 1.0, -1.0
    (xq, x_scale), (wq, w_scale) = rounded(x), rounded(weight)
    dots = (xq.double() @ wq.double().t()).float()
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), dots * x_scale * w_scale.t())


@pytest.mark.parametrize(
    ("quantization", "group", "error"), [("int8", 64, 0.01), ("int4", 64, 0.1), ("int4", 32, 0.09)]
)
def test_a_product_is_near_the_unquantised_one(
    make_ops: MakeOps, quantization: Quantization, group: int, error: float
) -> None:
    ops, reference = make_ops(quantization=quantization), ReferenceOps(torch.device("cpu"), torch.float32)
    weight, x = torch.randn(100, 576), torch.randn(20, 576)
    y, exact = ops.linear(x, ops.pack_linear(weight)), reference.linear(x, weight)
    assert (y - exact).norm() < error * exact.norm()


@QUANTISED
@pytest.mark.parametrize(("columns", "inner"), [(33, 65), (320, 576), (40, 1100)])
def test_a_row_does_not_depend_on_its_company_or_on_threads(
    make_ops: MakeOps, quantization: Quantization, group: int, columns: int, inner: int
) -> None:
    one, two = (make_ops(threads=threads, quantization=quantization) for threads in (1, 2))
    weight = one.pack_linear(torch.randn(columns, inner))
    x = torch.randn(64, inner)
    alone = torch.cat([one.linear(row[None], weight) for row in x])
    for rows in (2, 3, 4, 5, 7, 12, 13, 25, 40, 64):
        for ops in (one, two):
            assert torch.equal(ops.linear(x[-rows:], weight), alone[-rows:])


@DTYPES
@SHAPES
def test_int8_keeps_each_weight_to_half_a_step(
    make_ops: MakeOps, columns: int, inner: int, dtype: torch.dtype
) -> None:
    ops = make_ops(dtype, quantization="int8")
    weight = torch.randn(columns, inner).to(dtype)
    q, scale = rounded(weight.float())
    assert torch.equal(ops.unpack_linear(ops.pack_linear(weight.clone())), (q * scale).to(dtype))


def decode_int4(packed: PackedWeight, panel: int) -> Tensor:
    """[N, K] from the bytes, as layouts.h describes them, in panels of so many columns."""
    groups, halves = (
        -(-packed.inner // packed.group),
        2 * panel,
    )  # bytes of a group's scales, and of its minima
    data = packed.data.view(-1, groups, 2 * halves + panel * packed.group // 2)
    scale, minimum = (data[..., i : i + halves].contiguous().view(torch.float16).float() for i in (0, halves))
    octets = data[..., 2 * halves :].reshape(len(data), groups, packed.group // 8, panel, 4)
    codes = torch.stack((octets & 15, octets >> 4), dim=3)  # [panel, group, octet, half, column, 4]
    codes = codes.permute(0, 4, 1, 2, 3, 5).reshape(len(data), panel, groups, packed.group)
    weight = codes * scale.transpose(1, 2)[..., None] + minimum.transpose(1, 2)[..., None]
    return weight.reshape(len(data) * panel, -1)[: packed.columns, : packed.inner]


@pytest.mark.parametrize("group", [32, 64])
@DTYPES
@SHAPES
def test_int4_unpacks_what_its_codes_stand_for(
    make_ops: MakeOps, isa: str, columns: int, inner: int, dtype: torch.dtype, group: int
) -> None:
    ops = make_ops(dtype, quantization="int4")
    packed = ops.pack_linear(torch.randn(columns, inner).to(dtype))
    decoded = decode_int4(packed, open_library(isa)[1].motet_panel_columns())
    assert torch.equal(ops.unpack_linear(packed), decoded.to(dtype))


@pytest.mark.parametrize("group", [32, 64])
def test_int4_is_nearer_to_the_weights_than_plain_rounding(make_ops: MakeOps, group: int) -> None:
    ops = make_ops(quantization="int4")
    weight = torch.randn(96, 576)
    low, high = (f(weight.view(-1, group), 1, keepdim=True) for f in (torch.amin, torch.amax))
    scale, low = ((high - low) * torch.tensor(1 / 15)).half().float(), low.half().float()
    plain = torch.round((weight.view(-1, group) - low) / scale).clamp(0, 15) * scale + low
    errors = [
        (w - weight.view(-1, group)).square().sum(1)
        for w in (ops.unpack_linear(ops.pack_linear(weight.clone())).view(-1, group), plain)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert errors[0].sum() < 0.9 * errors[1].sum()


@pytest.mark.parametrize("group", [32, 64])
def test_int4_keeps_weights_that_are_codes(make_ops: MakeOps, group: int) -> None:
    ops = make_ops(quantization="int4")
    codes = torch.randint(16, (40, 128 // group, group))
    codes[..., 0], codes[..., 1] = 0, 15
    scale, minimum = (torch.rand(2, 40, 128 // group, 1) - 0.5).abs().half().float()
    weight = (codes * scale - minimum).view(40, 128)
    assert torch.equal(ops.unpack_linear(ops.pack_linear(weight.clone())), weight)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@DTYPES
def test_a_table_keeps_eight_bits_and_embeds_what_it_unpacks_to(
    make_ops: MakeOps, quantization: Quantization, dtype: torch.dtype
) -> None:
    ops = make_ops(dtype, quantization=quantization)
    table = torch.randn(70, 50).to(dtype)
    packed = ops.pack_table(table.clone())
    q, scale = rounded(table.float())
    ids = torch.randint(70, (7,))
    assert torch.equal(ops.embedding(ids, packed), (q * scale)[ids])
    assert ops.embedding(ids[:0], packed).shape == (0, 50)


@QUANTISED
def test_what_is_not_finite_stays_in_its_row_and_column(
    make_ops: MakeOps, quantization: Quantization, group: int
) -> None:
    ops = make_ops(quantization=quantization)
    weight, x = torch.randn(40, 150), torch.randn(5, 150)
    expected = ops.linear(x, ops.pack_linear(weight.clone()))
    x[1, 149], x[3, 0] = torch.nan, -torch.inf
    weight[2, 140], weight[33, 0] = torch.nan, torch.inf
    y = ops.linear(x, ops.pack_linear(weight))
    assert y[[1, 3]].isnan().all() and y[:, [2, 33]].isnan().all()
    rows, columns = torch.tensor([0, 2, 4]), torch.tensor([i for i in range(40) if i not in (2, 33)])
    assert torch.equal(y[rows][:, columns], expected[rows][:, columns])


@pytest.mark.parametrize(("quantization", "largest"), [("int8", 1e30), ("int4", 6e4)])
def test_rows_and_weights_of_any_size(make_ops: MakeOps, quantization: Quantization, largest: float) -> None:
    ops = make_ops(quantization=quantization)
    ones = torch.ones(3, 50)
    for size in (0.0, 1e-44, 1e-35, 1e-7, 1.0, largest):
        for x, weight in ((ones, ones * size), (ones * 1e30, ones)):
            y = ops.linear(x, ops.pack_linear(weight.clone()))
            torch.testing.assert_close(
                y, x @ weight.t(), rtol=1e-5, atol=2e-6
            )  # 50 times half the smallest half


@QUANTISED
def test_a_recorded_product_can_be_made_again(
    make_ops: MakeOps, quantization: Quantization, group: int
) -> None:
    ops = make_ops(quantization=quantization)
    table, weight = ops.pack_table(torch.randn(40, 50)), ops.pack_linear(torch.randn(40, 50))
    ids = torch.tensor([3, 39])

    def step() -> Tensor:
        return ops.linear(ops.embedding(ids, table), weight)

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
