"""The reference backend (but for LoRA and sampling) against code that we did not write."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, eager_attention_forward
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary_pos_emb

from motet.kernels.ops import select_ops
from motet.kernels.reference import ReferenceKV, ReferenceOps

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture
def ops() -> ReferenceOps:
    return ReferenceOps(CPU, torch.float32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), **TOLERANCE[dtype])


def test_select_ops_gives_the_backend_with_the_dtype_asked_for() -> None:
    assert select_ops("auto", "auto").dtype == torch.float32
    assert select_ops("cpu", "bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="'cuda'"):
        select_ops("cuda", "auto")


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 63, 64, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_linear_equals_the_dense_product(ops: ReferenceOps, rows: int, bias: bool, packed: bool) -> None:
    x, weight = random(rows, 37), random(51, 37, seed=1)
    b = random(51, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (b.double() if b is not None else 0.0)
    y = ops.linear(x, ops.pack_linear(weight) if packed else weight, b)
    assert y.shape == (rows, 51)
    assert_close(y, expected)


def test_embedding_picks_rows(ops: ReferenceOps) -> None:
    table = random(11, 5)
    assert torch.equal(
        ops.embedding(torch.tensor([10, 0, 10]), table), torch.stack([table[i] for i in (10, 0, 10)])
    )


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (0, 8)])
def test_rms_norm_equals_llamas(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    ops = ReferenceOps(CPU, dtype)
    x = random(*shape, dtype=dtype) * 1e-3  # so small that eps counts
    oracle = LlamaRMSNorm(shape[1], eps=1e-6).to(dtype)
    oracle.weight.data = random(shape[1], dtype=dtype, seed=1)
    with torch.no_grad():
        assert_close(ops.add_rms_norm(x, torch.zeros_like(x), oracle.weight, 1e-6), oracle(x), dtype)
        residual = random(*shape, dtype=dtype, seed=2)
        expected = residual + x
        assert_close(ops.add_rms_norm(x, residual, oracle.weight, 1e-6), oracle(expected), dtype)
        assert torch.equal(residual, expected), "the residual is not updated in place"


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (0, 8), (5, 3, 16)])
def test_rms_norm_of_heads_with_a_float32_weight_equals_gemmas(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = random(*shape, dtype=dtype) * 1e-3
    oracle = Gemma2RMSNorm(shape[-1], eps=1e-6)
    oracle.weight.data = random(shape[-1], seed=1) * 0.01  # 1 + it is hardly 1 in bfloat16
    weight = 1 + oracle.weight.data
    ops = ReferenceOps(CPU, dtype)
    with torch.no_grad():
        torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), oracle(x))
        if x.dim() == 2:
            torch.testing.assert_close(ops.add_rms_norm(x, torch.zeros_like(x), weight, 1e-6), oracle(x))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (0, 4)])
def test_gelu_tanh_and_mul_is_gemmas_activation(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate, up = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    expected = ACT2FN["gelu_pytorch_tanh"](gate) * up
    assert_close(ReferenceOps(CPU, dtype).gelu_tanh_and_mul(torch.cat((gate, up), -1)), expected, dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (0, 4)])
def test_silu_and_mul_is_swiglu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate, up = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    expected = gate.double() * gate.double().sigmoid() * up.double()
    assert_close(ReferenceOps(CPU, dtype).silu_and_mul(torch.cat((gate, up), -1)), expected, dtype)


def angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, head_dim / 2]."""
    inverse_frequency = 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    phase = positions[:, None] * inverse_frequency
    return phase.cos(), phase.sin()


def poisoned(
    ops: ReferenceOps, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> ReferenceKV:
    kv = ops.new_kv_cache(num_blocks, block_size, num_kv_heads, head_dim)
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    return kv


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 32), (9, 3, 64), (8, 1, 80), (4, 4, 128), (2, 1, 256)]
)
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_rope_equals_llamas_and_fills_the_slots(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, tokens: int
) -> None:
    ops = ReferenceOps(CPU, dtype)
    kv = poisoned(ops, 6, 4, num_kv_heads, head_dim)
    qkv = random(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q, k, v = (
        x.unflatten(-1, (-1, head_dim)).clone()
        for x in qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], -1)
    )
    cos, sin = angles(torch.arange(tokens) * 601, head_dim)
    full_cos, full_sin = (torch.cat((x, x), -1).to(dtype) for x in (cos, sin))
    expected_q, expected_k = apply_rotary_pos_emb(q, k, full_cos, full_sin, unsqueeze_dim=1)
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[tokens // 2 :: 5] = -1

    signed_sin = torch.cat((-sin, sin), -1).to(dtype)
    rotated = ops.rope_and_store_kv(qkv, full_cos, signed_sin, kv, slots, num_heads, num_kv_heads)

    assert_close(rotated, expected_q, dtype)
    in_place = torch.cat((expected_q.flatten(1), expected_k.flatten(1), v.flatten(1)), -1)
    assert_close(qkv, in_place, dtype)
    kept = slots >= 0
    assert_close(kv.k[slots[kept]], expected_k[kept], dtype)
    assert torch.equal(kv.v[slots[kept]], v[kept])
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert kv.k[:24][untouched].isnan().all(), "a padding row was stored in somebody's slot"
    assert kv.v[:24][untouched].isnan().all()


@pytest.mark.parametrize("rotary_dim", [0, 8, 24, 32])
def test_rope_turns_only_the_first_dimensions_where_there_are_fewer_angles(rotary_dim: int) -> None:
    ops = ReferenceOps(CPU, torch.float32)
    kv = ops.new_kv_cache(2, 4, 2, 32)
    qkv = random(5, (4 + 2 * 2) * 32)
    q, k, v = (x.unflatten(-1, (-1, 32)).clone() for x in qkv.split([4 * 32, 2 * 32, 2 * 32], -1))
    cos, sin = angles(torch.arange(5) * 601, rotary_dim)
    expected_q, expected_k = apply_partial_rotary_pos_emb(
        q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    )
    rotated = ops.rope_and_store_kv(
        qkv, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), kv, torch.arange(5), 4, 2
    )
    assert_close(rotated, expected_q)
    assert_close(kv.k[:5], expected_k)
    assert torch.equal(kv.v[:5], v)


class PagedCase:
    """Sequences of (q_len, seq_len) in blocks that lie in random order, all other memory NaN."""

    def __init__(
        self,
        sequences: Sequence[tuple[int, int]],
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 32,
        block_size: int = 4,
        seed: int = 0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        self.ops = ReferenceOps(CPU, torch.float32)
        self.window, self.softcap = window, softcap
        self.sequences, self.block_size, self.scale = sequences, block_size, head_dim**-0.5
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        blocks = [-(-seq_len // block_size) for _, seq_len in sequences]
        order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(seed))
        self.block_tables = torch.full((len(sequences), max(blocks, default=0) + 1), -1)
        self.kv = poisoned(self.ops, len(order), block_size, num_kv_heads, head_dim)
        self.q, self.k, self.v = [], [], []
        for s, (_, seq_len) in enumerate(sequences):
            self.block_tables[s, : blocks[s]], order = order[: blocks[s]], order[blocks[s] :]
            self.q.append(random(seq_len, num_heads, head_dim, seed=seed + 10 * s + 1))
            self.k.append(random(seq_len, num_kv_heads, head_dim, seed=seed + 10 * s + 2))
            self.v.append(random(seq_len, num_kv_heads, head_dim, seed=seed + 10 * s + 3))
            slots = self.slots(s, seq_len)
            self.kv.k[slots], self.kv.v[slots] = self.k[s], self.v[s]

    def but(self, **changes: Any) -> PagedCase:
        """The same memory, seen by other sequences."""
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other

    def slots(self, s: int, length: int) -> Tensor:
        position = torch.arange(length)
        return (
            self.block_tables[s, position // self.block_size] * self.block_size + position % self.block_size
        )

    def run(self) -> list[Tensor]:
        """One call for all; per sequence [q_len, num_heads · head_dim]."""
        q_lens = [q_len for q_len, _ in self.sequences]
        cu_seqlens_q = torch.tensor([0, *np.cumsum(q_lens, dtype=int)])
        seq_lens = torch.tensor([seq_len for _, seq_len in self.sequences], dtype=torch.int64)
        plan = self.ops.plan_attention(
            cu_seqlens_q, seq_lens, self.block_tables, self.block_size, self.window
        )
        rows = [q[len(q) - q_len :] for q, q_len in zip(self.q, q_lens, strict=True)]
        q = torch.cat(rows) if rows else torch.empty(0, self.num_heads, self.head_dim)
        out = self.ops.paged_attention(q, self.kv, plan, self.scale, self.softcap)
        assert out.shape == (len(q), self.num_heads * self.head_dim)
        return list(out.split(q_lens))

    def oracle(self, s: int) -> Tensor:
        """transformers' eager attention over the whole sequence, with an explicit causal mask."""
        q_len, seq_len = self.sequences[s]
        sees = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        if self.window is not None:
            sees &= ~sees.tril(-self.window)
        mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[None, None]
        module = SimpleNamespace(num_key_value_groups=self.num_heads // self.num_kv_heads, training=False)
        q, k, v = (x[s].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        out, _ = eager_attention_forward(module, q, k, v, mask, scaling=self.scale, softcap=self.softcap)
        return out[0, seq_len - q_len :].flatten(1)

    def check(self) -> None:
        for s, out in enumerate(self.run()):
            assert_close(out, self.oracle(s))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 32), (9, 3, 64), (8, 1, 80), (4, 4, 128), (14, 2, 96), (2, 1, 256)],
)
def test_attention_equals_eager_for_prefill_chunks_and_decodes_in_one_call(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    sequences = [(5, 5), (1, 1), (1, 17), (3, 20), (7, 7), (1, 40), (1, 41), (8, 100), (1, 300)]
    PagedCase(sequences, num_heads, num_kv_heads, head_dim).check()


@given(
    st.lists(
        st.integers(1, 90).flatmap(lambda n: st.tuples(st.integers(1, n) | st.just(1), st.just(n))),
        max_size=12,
    ),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([None, 1, 2, 7, 64, 1000]),
    st.sampled_from([None, 0.5, 50.0]),
    st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_attention_equals_eager_for_any_mix_of_lengths_windows_and_softcaps(
    sequences: list[tuple[int, int]], block_size: int, window: int | None, softcap: float | None, seed: int
) -> None:
    PagedCase(sequences, block_size=block_size, window=window, softcap=softcap, seed=seed).check()


def test_keys_and_values_that_have_left_the_window_are_not_read() -> None:
    case = PagedCase([(1, 40), (3, 30)], window=8)
    expected = [case.oracle(s) for s in range(2)]
    for s, (q_len, seq_len) in enumerate(case.sequences):
        gone = case.slots(s, seq_len - q_len - 8 + 1)
        case.kv.k[gone] = case.kv.v[gone] = float("nan")
    for out, reference in zip(case.run(), expected, strict=True):
        assert_close(out, reference)


def test_chunks_give_what_the_whole_prompt_gives() -> None:
    (whole,) = PagedCase([(50, 50)]).run()
    for chunk in (1, 7, 16):
        case = PagedCase([(50, 50)])
        parts = []
        for end in [*range(chunk, 50, chunk), 50]:
            start = end - (end - 1) % chunk - 1
            case.kv.k[case.slots(0, 50)[end:]] = float("nan")  # not computed yet
            case.kv.v[case.slots(0, 50)[end:]] = float("nan")
            case.kv.k[case.slots(0, 50)[:end]] = case.k[0][:end]
            case.kv.v[case.slots(0, 50)[:end]] = case.v[0][:end]
            parts += case.but(sequences=[(end - start, end)], q=[case.q[0][:end]]).run()
        assert_close(torch.cat(parts), whole)


def test_a_sequence_gets_the_same_beside_any_company() -> None:
    sequences = [(1, 33), (4, 60), (1, 200), (1, 35), (30, 30)]
    together = PagedCase(sequences)
    for s, out in enumerate(together.run()):
        alone = together.but(
            sequences=[sequences[s]], q=[together.q[s]], block_tables=together.block_tables[s : s + 1]
        )
        assert_close(alone.run()[0], out)


def test_an_empty_step_is_fine(ops: ReferenceOps) -> None:
    PagedCase([]).check()
    assert ops.embedding(torch.empty(0, dtype=torch.int64), random(5, 3)).shape == (0, 3)


@DTYPES
def test_copied_blocks_equal_their_sources_and_no_other_block_changes(dtype: torch.dtype) -> None:
    ops = ReferenceOps(CPU, dtype)
    kv = ops.new_kv_cache(num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8)
    kv.both.copy_(random(*kv.both.shape, dtype=dtype))
    before = kv.both.clone()
    ops.copy_kv_blocks(kv, torch.tensor([1, 1, 5]), torch.tensor([3, 0, 2]), block_size=4)
    for block, source in enumerate([1, 1, 5, 1, 4, 5]):
        for offset in range(4):
            assert torch.equal(kv.both[4 * block + offset], before[4 * source + offset])
    assert torch.equal(kv.both[-1], before[-1])
