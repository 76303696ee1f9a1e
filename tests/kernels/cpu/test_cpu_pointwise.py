"""Norms, activations and the residual stream of the native backend, against transformers' modules and the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from motet.kernels.cpu.ops import CpuOps
from motet.kernels.reference import ReferenceOps
from tests.kernels.cpu.conftest import MakeOps

REFERENCE = ReferenceOps(torch.device("cpu"), torch.float32)

# Around the vectors' widths and the four sums of a norm; of real models; longer than a part.
SIZES = [1, 3, 7, 8, 15, 16, 17, 63, 64, 65, 129, 576, 1536, 20_001]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def poisoned(x: Tensor) -> Tensor:
    """An equal tensor with NaN before and behind it in memory."""
    around = torch.full((x.numel() + 128,), float("nan"))
    around[64:-64] = x.flatten()
    return around[64:-64].view(x.shape)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms_are_llamas(make_ops: MakeOps, rows: int, size: int) -> None:
    ops = make_ops()
    x, residual = random(rows, size) * 1e-3, random(rows, size, seed=2) * 1e-3  # so small that eps counts
    oracle = LlamaRMSNorm(size, eps=1e-6)
    oracle.weight.data = random(size, seed=1)
    weight = poisoned(oracle.weight.data)
    with torch.no_grad():
        assert_close(ops.rms_norm(poisoned(x), weight, 1e-6), oracle(x))
        stream = poisoned(residual)
        assert_close(ops.add_rms_norm(poisoned(x), stream, weight, 1e-6), oracle(residual + x))
        assert torch.equal(stream, residual + x), "the residual is not updated in place"


@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 0, 16), (2, 1, 3, 7), (9,)])
def test_rms_norm_is_of_the_last_axis(make_ops: MakeOps, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    y = make_ops().rms_norm(x, weight, 1e-5)
    assert y.shape == shape
    assert_close(y, REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("head_dim", [1, 5, 16, 64, 80, 256])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_norms_of_heads_change_their_columns_alone(make_ops: MakeOps, rows: int, head_dim: int) -> None:
    x, weight = random(rows, 6 * head_dim), random(head_dim, seed=1)
    y, expected = poisoned(x), x.clone()
    make_ops().rms_norm_heads(y, head_dim, 4 * head_dim, weight, 1e-6)
    REFERENCE.rms_norm_heads(expected, head_dim, 4 * head_dim, weight, 1e-6)
    assert_close(y, expected)
    for untouched in (slice(0, head_dim), slice(4 * head_dim, None)):
        assert torch.equal(y[:, untouched], x[:, untouched])


def test_a_norm_with_a_weight_of_another_dtype_is_refused(make_ops: MakeOps) -> None:
    with pytest.raises(TypeError, match=r"bfloat16; make it in Ops\.activations"):
        make_ops().rms_norm(random(2, 8), random(8).bfloat16(), 1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_gates_are_those_of_transformers(make_ops: MakeOps, activation: str, rows: int, size: int) -> None:
    ops = make_ops()
    gate = {"silu": ops.silu_and_mul, "gelu_pytorch_tanh": ops.gelu_tanh_and_mul}[activation]
    x = 4 * random(rows, 2 * size)
    assert_close(gate(poisoned(x)), ACT2FN[activation](x[:, :size].double()).float() * x[:, size:])


def test_activations_hold_from_end_to_end(make_ops: MakeOps) -> None:
    ops = make_ops()
    x = torch.cat(
        [torch.linspace(-200, 200, 4001), torch.logspace(-40, 30, 701), -torch.logspace(-40, 1.3, 701)]
    )
    x = torch.stack((x, torch.ones_like(x))).flatten()[None]
    wide = x[:, : x.shape[1] // 2].double()
    assert_close(ops.silu_and_mul(x), torch.nn.functional.silu(wide).float())
    assert_close(ops.gelu_tanh_and_mul(x), torch.nn.functional.gelu(wide, approximate="tanh").float())


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_a_fault_in_a_row_shows_and_stays_there(make_ops: MakeOps, op: str) -> None:
    x = random(3, 40)
    x[1, 2], x[1, 27] = float("nan"), float("nan")
    y = getattr(make_ops(), op)(x)
    assert y.isnan().nonzero().tolist() == [[1, 2], [1, 7]]


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 17), (70, 576), (2, 49152)])
def test_the_residual_stream_is_added_scaled_and_picked_as_by_torch(
    make_ops: MakeOps, shape: tuple[int, int]
) -> None:
    ops, x, residual = make_ops(), random(*shape), random(*shape, seed=1)
    assert torch.equal(ops.zeros_like(poisoned(x)), torch.zeros(shape))
    total = poisoned(residual)
    ops.add_residual(poisoned(x), total)
    assert torch.equal(total, residual + x)
    scaled = poisoned(x)
    ops.scale(scaled, 24.0)
    assert torch.equal(scaled, x * 24.0)
    rows = torch.arange(shape[0]).repeat(2).flip(0)
    assert torch.equal(ops.take_rows(poisoned(x), rows), x[rows])
    assert ops.take_rows(x, rows[:0]).shape == (0, shape[1])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_tokens_that_were_sampled_are_filled_in_where_they_are_awaited(
    make_ops: MakeOps, backend: str
) -> None:
    ops = make_ops() if backend == "native" else ReferenceOps(torch.device("cpu"), torch.float32)
    ids, source = torch.tensor([7, -1, 8, -1, -1]), torch.tensor([-1, 2, -1, 0, 2])
    ops.fill_sampled(ids, torch.tensor([100, 101, 102]), source)
    assert ids.tolist() == [7, 102, 8, 100, 102]
    ops.fill_sampled(ids[:0], torch.tensor([], dtype=torch.int64), source[:0])


@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_capped_logits_are_torchs_near_zero_and_far(make_ops: MakeOps, cap: float) -> None:
    x = torch.cat([torch.linspace(-5 * cap, 5 * cap, 4001), torch.logspace(-30, 30, 601), random(3)])[None]
    y = make_ops().as_logits(x.clone(), cap)
    torch.testing.assert_close(y, (cap * (x.double() / cap).tanh()).float(), rtol=4e-7, atol=0)
    assert torch.equal(make_ops().as_logits(x.clone()), x)


OPS: dict[str, Callable[[CpuOps, Tensor, Tensor], Tensor]] = {
    "rms_norm": lambda ops, x, w: ops.rms_norm(x, w, 1e-6),
    "add_rms_norm": lambda ops, x, w: ops.add_rms_norm(x, x.flip(1).contiguous(), w, 1e-6),
    "silu_and_mul": lambda ops, x, w: ops.silu_and_mul(x),
    "gelu_tanh_and_mul": lambda ops, x, w: ops.gelu_tanh_and_mul(x),
    "softcap": lambda ops, x, w: ops.as_logits(x.clone(), 3.0),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("size", [18, 576, 3072, 9002])
def test_a_row_is_the_same_bits_alone_in_any_batch_on_any_threads(
    make_ops: MakeOps, name: str, size: int
) -> None:
    op, one, two = OPS[name], make_ops(threads=1), make_ops(threads=2)
    x, weight = random(64, size), random(size, seed=1)
    alone = torch.cat([op(one, x[i : i + 1], weight) for i in range(64)])
    for rows in (2, 3, 17, 64):
        for ops in (one, two):
            assert torch.equal(op(ops, x[:rows], weight), alone[:rows])
