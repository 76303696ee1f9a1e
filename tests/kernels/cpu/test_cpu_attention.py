"""Native rope, KV cache and paged attention: against the reference and code that we did not write, and bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from motet.kernels.cpu.attention import PagedAttentionPlan, PagedKV
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.reference import ReferenceOps
from tests.kernels.cpu.conftest import MakeOps

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NAN = float("nan")
reference = ReferenceOps(torch.device("cpu"), torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Context:
    """One sequence: q [n, heads, d], k and v [n, KV heads, d] of its n tokens; k and v as bf16 can hold them."""

    def __init__(
        self, length: int, num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 32, seed: int = 0
    ):
        self.length, self.num_kv_heads, self.head_dim = length, num_kv_heads, head_dim
        self.q = random(length, num_heads, head_dim, seed=3 * seed)
        self.k, self.v = (
            random(length, num_kv_heads, head_dim, seed=3 * seed + i).bfloat16().float() for i in (1, 2)
        )

    def oracle(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        """transformers' eager attention, in float64, with an explicit mask -> [n, heads · d]."""
        sees = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        if window is not None:
            sees &= ~sees.tril(-window)
        mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, float("-inf"))[None, None]
        groups = self.q.shape[1] // self.num_kv_heads
        module = SimpleNamespace(num_key_value_groups=groups, training=False)
        q, k, v = (x.double().transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        out, _ = eager_attention_forward(module, q, k, v, mask, scaling=self.head_dim**-0.5, softcap=softcap)
        return out[0].flatten(1)


Rows = tuple[Context, Tensor, slice]
"""A sequence, its blocks, and which of its tokens attend (a slice with start and stop)."""


class Memory:
    """A cache full of NaN, whose blocks are given out in random order."""

    def __init__(self, ops: CpuOps, num_blocks: int, block_size: int, like: Context, seed: int = 0) -> None:
        self.ops, self.block_size, self.q_shape = ops, block_size, like.q.shape[1:]
        self.kv: PagedKV = ops.new_kv_cache(num_blocks, block_size, like.num_kv_heads, like.head_dim)
        self.kv.data.fill_(NAN)
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()

    def table(self, length: int) -> Tensor:
        return torch.tensor([self.free.pop() for _ in range(-(-length // self.block_size))])

    def slots(self, table: Tensor, positions: Tensor) -> Tensor:
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, context: Context, table: Tensor, tokens: slice = slice(None)) -> None:
        """Stores k and v by the op that is there for it, with no dimension turning."""
        positions = torch.arange(context.length)[tokens]
        qkv = torch.cat([x[tokens].flatten(1) for x in (context.q, context.k, context.v)], -1)
        nothing = torch.empty(len(positions), 0)
        heads = context.q.shape[1], context.num_kv_heads
        slots = self.slots(table, positions)
        q = self.ops.rope_and_store_kv(qkv, nothing, nothing, self.kv, slots, *heads)
        assert torch.equal(q, context.q[tokens])

    def last_tokens(self, contexts: Sequence[Context], counts: Sequence[int]) -> list[Rows]:
        """Writes whole contexts; as what to attend from, the last tokens of each."""
        tables = [self.table(context.length) for context in contexts]
        for context, table in zip(contexts, tables, strict=True):
            self.write(context, table)
        return [
            (c, table, slice(c.length - n, c.length))
            for c, table, n in zip(contexts, tables, counts, strict=True)
        ]

    def attend(
        self,
        rows: Sequence[Rows],
        window: int | None = None,
        softcap: float | None = None,
    ) -> list[Tensor]:
        """One call for some tokens of each sequence."""
        lengths = torch.tensor([tokens.stop - tokens.start for _, _, tokens in rows], dtype=torch.int64)
        cu_seqlens_q = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        seq_lens = torch.tensor([tokens.stop for _, _, tokens in rows], dtype=torch.int64)
        tables = torch.full((len(rows), max((len(t) for _, t, _ in rows), default=0) + 1), -1)
        for own, (_, table, _) in zip(tables, rows, strict=True):
            own[: len(table)] = table
        plan = self.ops.plan_attention(cu_seqlens_q, seq_lens, tables, self.block_size, window)
        q = torch.cat([torch.empty(0, *self.q_shape), *(context.q[tokens] for context, _, tokens in rows)])
        out = self.ops.paged_attention(q, self.kv, plan, self.kv.head_dim**-0.5, softcap)
        return list(out.split(lengths.tolist()))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-5, atol=2e-5)


@DTYPES
@pytest.mark.parametrize("magnitude", [1.0, 1.19])
def test_cos_and_sin_are_torchs(make_ops: MakeOps, dtype: torch.dtype, magnitude: float) -> None:
    positions = torch.tensor([0, 1, 2, 77, 4095, 131071, 2**24 + 1])
    frequencies = 1e4 ** -(torch.arange(0, 34, 2).float() / 34)
    ours = make_ops(dtype).rope_cos_sin(positions, frequencies, magnitude)
    theirs = reference.rope_cos_sin(positions, frequencies, magnitude)
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == (7, 34)
        torch.testing.assert_close(x, y, rtol=1.2e-7 if magnitude == 1 else 2.4e-7, atol=1e-9)
    assert make_ops(dtype).rope_cos_sin(positions, frequencies[:0])[0].shape == (7, 0)


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "turning"),
    [(1, 1, 8, 8), (9, 3, 64, 64), (8, 1, 80, 32), (4, 4, 20, 10), (2, 1, 256, 0), (2, 2, 96, 72)],
)
@pytest.mark.parametrize("rows", [0, 1, 13, 100])
def test_rope_is_transformers_to_the_bit_and_qkv_turns_in_place(
    make_ops: MakeOps,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    turning: int,
    rows: int,
) -> None:
    ops = make_ops(dtype)
    kv = ops.new_kv_cache(8, 16, num_kv_heads, head_dim)
    qkv = random(rows, (num_heads + 2 * num_kv_heads) * head_dim)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = (x.unflatten(-1, (-1, head_dim)).clone() for x in qkv.split(sizes, -1))
    phase = torch.arange(rows)[:, None] * 601 * 1e4 ** -(torch.arange(turning // 2) / 40)
    cos, sin = (torch.cat((x, x), -1) for x in (phase.cos(), phase.sin()))
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin)
    signed = torch.cat((-sin[:, : turning // 2], sin[:, turning // 2 :]), -1)
    out = ops.rope_and_store_kv(qkv, cos, signed, kv, torch.arange(rows), num_heads, num_kv_heads)
    assert torch.equal(out, expected_q)
    assert torch.equal(qkv, torch.cat([x.flatten(1) for x in (expected_q, expected_k, v)], -1))


@DTYPES
@pytest.mark.parametrize("block_size", [1, 5, 16, 48])
@pytest.mark.parametrize("head_dim", [8, 17, 20, 64])
def test_a_row_is_stored_in_its_slot_and_nowhere_else(
    make_ops: MakeOps, dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    """A sequence of one token attends to itself alone: what comes out is the value that was stored."""
    ops = make_ops(dtype)
    context = Context(100, head_dim=head_dim)
    memory = Memory(ops, -(-100 // block_size), block_size, context)
    before = memory.kv.data.clone()
    nothing, qkv = (
        torch.empty(100, 0),
        torch.cat([x.flatten(1) for x in (context.q, context.k, context.v)], -1),
    )
    ops.rope_and_store_kv(qkv, nothing, nothing, memory.kv, torch.full((100,), -1), 6, 2)
    assert torch.equal(memory.kv.data.isnan(), before.isnan()), "padding was stored"
    table = memory.table(100)
    memory.write(context, table)
    one = Context(1, head_dim=head_dim)
    singles = memory.block_size == 1
    for position in range(0, 100, 1 if singles else block_size):
        own = table[position // block_size :][:1]
        (out,) = memory.attend([(one, own, slice(0, 1))])
        assert torch.equal(out, context.v[position].repeat_interleave(3, 0).flatten()[None])


MIXED_ROWS = (5, 1, 1, 3, 7, 1, 1, 8, 130, 1)
MIXED_LENGTHS = (5, 1, 17, 20, 7, 64, 65, 100, 190, 700)


@cache  # the same for all builds
def mixed_contexts(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[list[Context], list[Tensor]]:
    contexts = [Context(n, num_heads, num_kv_heads, head_dim, n) for n in MIXED_LENGTHS]
    return contexts, [context.oracle() for context in contexts]


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        (1, 1, 8),
        (2, 2, 17),
        (9, 3, 64),
        (8, 1, 80),
        (71, 1, 32),
        (4, 4, 128),
        (14, 2, 96),
        (2, 1, 256),
        (4, 2, 18),
    ],
)
def test_attention_equals_eager_for_prefill_and_decodes_in_one_call(
    make_ops: MakeOps, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    contexts, oracles = mixed_contexts(num_heads, num_kv_heads, head_dim)
    memory = Memory(make_ops(dtype), 90, 16, contexts[0])
    rows = memory.last_tokens(contexts, MIXED_ROWS)
    for out, oracle, count in zip(memory.attend(rows), oracles, MIXED_ROWS, strict=True):
        assert_close(out, oracle[-count:])


@given(
    st.lists(
        st.integers(1, 150).flatmap(lambda n: st.tuples(st.integers(1, n) | st.just(1), st.just(n))),
        max_size=6,
    ),
    st.sampled_from([1, 3, 16, 24, 32]),
    st.sampled_from([None, 1, 2, 7, 64, 100]),
    st.sampled_from([None, 0.5, 50.0]),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_attention_equals_eager_for_any_mix_of_lengths_blocks_windows_and_softcaps(
    make_ops: MakeOps,
    sequences: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    contexts = [Context(n, 4, 2, 24, seed + i) for i, (_, n) in enumerate(sequences)]
    memory = Memory(make_ops(torch.bfloat16, threads=1), 160 * 6, block_size, Context(1, 4, 2, 24), seed)
    rows = memory.last_tokens(contexts, [n for n, _ in sequences])
    for out, (context, _, some) in zip(memory.attend(rows, window, softcap), rows, strict=True):
        assert_close(out, context.oracle(window, softcap)[some])


@DTYPES
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("block_size", [16, 10])
def test_a_row_has_the_same_bits_in_any_chunks_and_company_and_on_any_threads(
    make_ops: MakeOps, dtype: torch.dtype, window: int | None, block_size: int
) -> None:
    """A prompt of more than one stretch of 512 tokens."""
    context = Context(1100)
    others = [Context(n, seed=9 + n) for n in (1, 40, 65, 600, 1100)]
    two, one = make_ops(dtype, threads=2), make_ops(dtype, threads=1)
    memory = Memory(two, 400, block_size, context)
    ((_, table, whole), *company) = memory.last_tokens([context, *others], [1100, 1, 40, 1, 130, 1])
    (expected,) = memory.attend([(context, table, whole)], window)
    assert_close(expected, context.oracle(window))
    for chunk in (1, 7, 16, 64, 500):
        starts = range(0, 1100, chunk) if chunk > 1 else (0, 63, 64, 511, 512, 700, 1099)
        for i, start in enumerate(starts):
            rows = (context, table, slice(start, min(start + chunk, 1100)))
            memory.ops = (one, two)[i % 2]
            if i % 5 == 0:
                out, *_ = memory.attend([rows, *company], window)
            elif i % 5 == 1:
                *_, out = memory.attend([*company[: i % 4], rows], window)
            else:
                (out,) = memory.attend([rows], window)
            assert torch.equal(out, expected[rows[2]]), f"tokens {start} to {start + chunk}"


@DTYPES
def test_decodes_in_batches_of_any_size_have_the_bits_that_they_have_alone(
    make_ops: MakeOps, dtype: torch.dtype
) -> None:
    contexts = [Context(1 + 97 * i % 650, 9, 3, 16, seed=i) for i in range(64)]
    memory = Memory(make_ops(dtype), 1500, 16, contexts[0])
    rows = memory.last_tokens(contexts, [1] * 64)
    alone = [memory.attend([row])[0] for row in rows]
    for size in (2, 3, 8, 31, 64):
        for out, expected in zip(memory.attend(rows[-size:]), alone[-size:], strict=True):
            assert torch.equal(out, expected)


@DTYPES
@pytest.mark.parametrize("window", [8, 70])
def test_what_a_row_does_not_see_is_not_read(make_ops: MakeOps, dtype: torch.dtype, window: int) -> None:
    context = Context(200)
    memory = Memory(make_ops(dtype), 20, 16, context)
    table = memory.table(200)
    memory.write(context, table)
    expected = context.oracle(window)
    for start, stop in ((150, 160), (90, 91), (127, 140)):
        gone = Context(200)
        gone.q, gone.k, gone.v = context.q, context.k.clone(), context.v.clone()
        gone.k[: max(0, start + 1 - window)] = gone.v[: max(0, start + 1 - window)] = NAN
        gone.k[stop:] = gone.v[stop:] = NAN
        memory.write(gone, table)
        (out,) = memory.attend([(context, table, slice(start, stop))], window)
        assert_close(out, expected[start:stop])
        memory.write(context, table)
    # A row's own later tokens, and those that only an earlier row's window still holds, are as foreign to it.
    for token in range(0, 200, 37):
        gone = Context(200)
        gone.q, gone.k, gone.v = context.q, context.k.clone(), context.v.clone()
        gone.k[token] = gone.v[token] = NAN
        memory.write(gone, table)
        (out,) = memory.attend([(context, table, slice(0, 200))], window)
        sees = slice(token, token + window)
        assert out[sees].isnan().all()
        out[sees] = expected[sees] = 0
        assert_close(out, expected)
        expected = context.oracle(window)
        memory.write(context, table)


def test_scores_far_apart_give_what_they_should(make_ops: MakeOps) -> None:
    """Whole numbers and a scale of 1/4, so that float32 holds all scores exactly."""
    context = Context(300, head_dim=16)
    context.q, context.k = (context.q * 100).round(), (context.k * 100).round()
    context.k[0] *= 50
    memory = Memory(make_ops(), 20, 16, context)
    rows = memory.last_tokens([context], [300])
    assert_close(memory.attend(rows)[0], context.oracle())


@DTYPES
@pytest.mark.parametrize("block_size", [5, 16])
def test_copied_blocks_equal_their_sources_and_no_other_block_changes(
    make_ops: MakeOps, dtype: torch.dtype, block_size: int
) -> None:
    kv = make_ops(dtype).new_kv_cache(6, block_size, 2, 8)
    kv.data.copy_(random(*kv.data.shape))
    expected = kv.data.clone()
    expected[[1, 0]] = expected[[4, 4]]
    make_ops(dtype).copy_kv_blocks(kv, torch.tensor([4, 4]), torch.tensor([1, 0]), block_size)
    assert torch.equal(kv.data, expected)


def test_slots_past_int32_are_reached(make_ops: MakeOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Address space alone: the system gives memory to what is written."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    ops = make_ops(torch.bfloat16)
    context = Context(40, 4, 1, 256)
    kv = ops.new_kv_cache(2**31 // (16 * 512) + 3, 16, 1, 256)
    assert kv.data.numel() > 2**31
    memory = Memory(ops, 1, 16, context)
    memory.kv, memory.free = kv, list(range(len(kv.data)))
    rows = memory.last_tokens([context], [3])
    assert_close(memory.attend(rows)[0], context.oracle()[-3:])


@DTYPES
def test_an_empty_step_is_fine(make_ops: MakeOps, dtype: torch.dtype) -> None:
    assert Memory(make_ops(dtype), 1, 16, Context(1)).attend([]) == []


@DTYPES
def test_attention_can_be_recorded_and_replayed_on_a_longer_context(
    make_ops: MakeOps, dtype: torch.dtype
) -> None:
    ops = make_ops(dtype)
    context, frequencies = Context(1000), 1e4 ** -(torch.arange(16) / 16)
    memory = Memory(ops, 100, 16, context)
    table = memory.table(1000)
    memory.write(context, table)
    steps = []
    for length in (5, 1000):
        plan = ops.plan_attention(
            torch.tensor([0, 1]), torch.tensor([length]), table[None, : -(-length // 16)], 16
        )
        position = torch.tensor([length - 1])
        qkv = random(1, 10 * 32, seed=length)
        steps.append((plan, [qkv, position, memory.slots(table, position), plan.header]))

    def step(plan: PagedAttentionPlan, inputs: list[Tensor]) -> Tensor:
        qkv, position, slot, _ = inputs
        cos, sin = ops.rope_cos_sin(position, frequencies)
        q = ops.rope_and_store_kv(qkv, cos, sin, memory.kv, slot, 6, 2)
        return ops.paged_attention(q, memory.kv, plan, 0.2)

    with torch.inference_mode():
        plan, inputs = steps[0]
        replay = ops.record(lambda: step(plan, [inputs[0].clone(), *inputs[1:]]), inputs)
        assert replay is None, "a clone is not recorded"
        replay = ops.record(lambda: step(plan, inputs), inputs)
        assert replay is not None
        plan, inputs = steps[1]
        expected = step(plan, [inputs[0].clone(), *inputs[1:]])
        assert torch.equal(replay(inputs), expected)
