"""Weights in llama.cpp's blocks, against the `gguf` library's own values of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from motet.kernels.cpu.ops import CpuOps
from motet.kernels.cpu.weights import PackedWeight
from motet.kernels.ops import BLOCK, BLOCK_KINDS, Blocks
from tests.kernels.cpu.conftest import BUILDS, MakeOps
from tests.kernels.cpu.test_cpu_quantised import DTYPES, ROWS, check_product

KINDS = pytest.mark.parametrize("kind", BLOCK_KINDS)
FUSED = pytest.mark.parametrize(
    "parts",
    [
        [("Q4_0", 48), ("Q4_1", 5), ("Q4_0", 60)],
        [("Q4_1", 7), ("Q4_1", 1), ("Q4_1", 40), ("Q4_1", 49)],
        [("Q8_0", 40), ("Q8_0", 9)],
    ],
)
"""Kinds and rows of what stands under each other; panels begin every 48, 24 or 12."""


@pytest.fixture(params=BUILDS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_blocks(kind: str, columns: int, inner: int) -> Blocks:
    """Of random weights, as the `gguf` library rounds them."""
    rows = gguf.quants.quantize(torch.randn(columns, inner).numpy(), gguf.GGMLQuantizationType[kind])
    return Blocks(kind, inner, torch.from_numpy(rows))


def values(*parts: Blocks) -> Tensor:
    kinds = [gguf.GGMLQuantizationType[part.kind] for part in parts]
    all_values = [gguf.quants.dequantize(p.rows.numpy(), kind) for p, kind in zip(parts, kinds, strict=True)]
    return torch.from_numpy(np.concatenate(all_values))


def halves(blocks: Blocks) -> Tensor:
    """The memory of the blocks' scales, and minima where they have some: [N, K / 32, 1 or 2]."""
    size = 4 if blocks.kind == "Q4_1" else 2
    return blocks.rows.view(len(blocks.rows), blocks.inner // BLOCK, -1)[..., :size].view(torch.float16)


def pack(ops: CpuOps, *parts: Blocks) -> PackedWeight:
    packed = ops.pack_blocks(parts)
    assert packed is not None
    return packed


@KINDS
@DTYPES
@pytest.mark.parametrize(("columns", "inner"), [(1, 32), (48, 64), (49, 96), (130, 576)])
def test_packed_weights_are_exactly_the_files(
    make_ops: MakeOps, kind: str, columns: int, inner: int, dtype: torch.dtype
) -> None:
    ops, blocks = make_ops(dtype, quantization="gguf"), make_blocks(kind, columns, inner)
    assert torch.equal(ops.unpack_linear(pack(ops, blocks)), values(blocks).to(dtype))


@KINDS
@DTYPES
@pytest.mark.parametrize(("columns", "inner"), [(1, 32), (49, 96), (130, 576)])
def test_blocks_expand_to_the_values_that_upstream_reads(
    make_ops: MakeOps, kind: str, columns: int, inner: int, dtype: torch.dtype
) -> None:
    blocks = make_blocks(kind, columns, inner)
    blocks.rows.random_(0, 256)
    halves(blocks).copy_(torch.randn(halves(blocks).shape) * 10.0 ** torch.randint(-8, 3, (columns, 1, 1)))
    out = torch.full((columns + 1, inner), torch.nan, dtype=dtype)
    assert make_ops(dtype).expand_blocks(blocks, out[:columns])
    assert torch.equal(out[:columns], values(blocks).to(dtype))
    assert out[columns:].isnan().all()


@KINDS
def test_any_codes_and_scales_are_kept(make_ops: MakeOps, kind: str) -> None:
    """Negative and tiny scales, all codes: what no quantiser need have written."""
    ops, blocks = make_ops(quantization="gguf"), make_blocks(kind, 70, 128)
    blocks.rows.random_(0, 256)
    halves(blocks).copy_(torch.randn(halves(blocks).shape) * 10.0 ** torch.randint(-8, 3, (70, 4, 1)))
    halves(blocks)[:5] = 0
    halves(blocks)[5:9] = 8188 if kind == "Q4_0" else 65504  # the largest whose minimum is a half
    assert torch.equal(ops.unpack_linear(pack(ops, blocks)), values(blocks))


@FUSED
def test_projections_under_each_other_keep_their_places(
    make_ops: MakeOps, parts: list[tuple[str, int]]
) -> None:
    ops = make_ops(quantization="gguf")
    blocks = [make_blocks(kind, columns, 96) for kind, columns in parts]
    assert torch.equal(ops.unpack_linear(pack(ops, *blocks)), values(*blocks))


@FUSED
def test_a_product_is_that_of_the_files_weights_and_activations_in_8_bits(
    make_ops: MakeOps, parts: list[tuple[str, int]]
) -> None:
    ops = make_ops(quantization="gguf")
    blocks = [make_blocks(kind, columns, 576) for kind, columns in parts]
    packed, weight = pack(ops, *blocks), values(*blocks)
    bias = torch.randn(len(weight))
    for rows in ROWS:
        x = torch.randn(rows, 576) * torch.rand(rows, 1) * 10
        y = ops.linear(x, packed)
        check_product(y, x, weight, BLOCK)
        assert torch.equal(ops.linear(x, packed, bias), y + bias)


def test_a_row_of_a_product_does_not_depend_on_its_company_or_on_threads(make_ops: MakeOps) -> None:
    one, two = (make_ops(threads=threads, quantization="gguf") for threads in (1, 2))
    weight = pack(one, make_blocks("Q8_0", 320, 1120))
    x = torch.randn(64, 1120)
    alone = torch.cat([one.linear(row[None], weight) for row in x])
    for rows in (2, 5, 6, 7, 13, 25, 64):
        for ops in (one, two):
            assert torch.equal(ops.linear(x[-rows:], weight), alone[-rows:])


@KINDS
def test_a_table_embeds_the_files_values(make_ops: MakeOps, kind: str) -> None:
    ops, blocks = make_ops(torch.bfloat16, quantization="gguf"), make_blocks(kind, 70, 64)
    table, ids = pack(ops, blocks), torch.tensor([69, 0, 31, 32, 69])
    assert torch.equal(ops.embedding(ids, table), values(blocks)[ids])
    assert ops.embedding(ids[:0], table).shape == (0, 64)


@KINDS
def test_a_recorded_step_on_blocks_can_be_made_again(make_ops: MakeOps, kind: str) -> None:
    ops = make_ops(quantization="gguf")
    table, weight = pack(ops, make_blocks(kind, 40, 64)), pack(ops, make_blocks(kind, 50, 64))
    ids = torch.tensor([3, 39])
    expected = ops.linear(ops.embedding(ids, table), weight)
    replay = ops.record(lambda: ops.linear(ops.embedding(ids, table), weight), [ids])
    assert replay is not None
    assert torch.equal(replay([ids.flip(0)]), expected.flip(0))


@KINDS
def test_a_scale_that_is_not_finite_stays_in_its_column(make_ops: MakeOps, kind: str) -> None:
    ops, blocks, x = make_ops(quantization="gguf"), make_blocks(kind, 40, 64), torch.randn(5, 64)
    expected = ops.linear(x, pack(ops, blocks))
    halves(blocks)[33, 1] = torch.nan
    y = ops.linear(x, pack(ops, blocks))
    assert y[:, 33].isnan().all()
    others = torch.arange(40) != 33
    assert torch.equal(y[:, others], expected[:, others])


def test_what_no_format_holds_exactly_is_not_packed(make_ops: MakeOps) -> None:
    ops, blocks = make_ops(quantization="gguf"), make_blocks("Q4_0", 3, 64)
    assert ops.pack_blocks([blocks, make_blocks("Q8_0", 3, 64)]) is None
    halves(blocks)[2, 1] = -8192.0  # its minimum would be 65536
    assert ops.pack_blocks([blocks]) is None


def test_blocks_are_kept_only_where_that_is_asked_for(make_ops: MakeOps) -> None:
    assert make_ops(quantization="gguf").keeps_blocks
    assert not any(make_ops(quantization=q).keeps_blocks for q in (None, "int8", "int4"))
