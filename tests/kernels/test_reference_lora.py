"""lora_shrink and lora_expand of the reference backend against dense products in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet.kernels.ops import LoRASlices, Ops, select_ops

NAN = float("nan")
OPS = {dtype: select_ops("cpu", dtype) for dtype in ("float32", "bfloat16")}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


@dataclass
class Case:
    """A packed linear with adapters at random places of an arena that is NaN everywhere else."""

    arena: Tensor
    slices: LoRASlices
    dense: list[Tensor]  # per slot: [N, K] float64, B · A of its projections one below the other


def make_case(ranks: list[list[int]], k: int, outs: list[int], ops: Ops, seed: int = 0) -> Case:
    """`ranks[slot][projection]`."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    pieces = [(s, p, side) for s in range(len(ranks)) for p in range(len(outs)) for side in "ab"]
    rng.shuffle(pieces)
    a_offset, b_offset = (torch.full((len(ranks), len(outs)), -1) for _ in range(2))
    chunks: list[Tensor] = []
    matrices: dict[tuple[int, int, str], Tensor] = {}
    end = 0
    for s, p, side in pieces:
        hole = torch.full((rng.randint(0, 9),), NAN)
        shape = (ranks[s][p], k) if side == "a" else (outs[p], ranks[s][p])
        matrix = torch.randn(shape, generator=generator).to(ops.dtype)
        chunks += [hole.to(ops.dtype), matrix.flatten()]
        (a_offset if side == "a" else b_offset)[s, p] = end + len(hole)
        matrices[s, p, side] = matrix.double()
        end += len(hole) + matrix.numel()
    dense = [
        torch.cat(
            [torch.einsum("nr,rk->nk", matrices[s, p, "b"], matrices[s, p, "a"]) for p in range(len(outs))]
        )
        for s in range(len(ranks))
    ]
    ends = torch.tensor(outs).cumsum(0).tolist()
    columns = tuple(zip([0, *ends[:-1]], ends, strict=True))
    arena = torch.cat([*chunks, torch.full((3,), NAN, dtype=ops.dtype)])
    none = torch.full_like(a_offset, -1)
    return Case(arena, LoRASlices(a_offset, b_offset, torch.tensor(ranks), none, none, columns), dense)


def check(case: Case, segments: list[tuple[int, int, int]], rows: int, ops: Ops, tolerance: float) -> None:
    """Shrink and expand add the dense delta to the segments' rows and touch nothing else."""
    n, k = case.dense[0].shape
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=generator).to(ops.dtype)
    base = torch.randn(rows, n, generator=generator).to(ops.dtype)
    table = torch.tensor(segments, dtype=torch.int64).view(-1, 3)
    row_slot = torch.full((rows,), -1)
    for slot, first, last in segments:
        row_slot[first:last] = slot
    x[row_slot < 0] = NAN  # base rows cost nothing: nobody reads them

    h = ops.lora_shrink(x, case.arena, case.slices, table)
    ranks = case.slices.rank
    assert h.shape[:2] == (rows, len(case.slices.columns))
    for t in range(rows):  # whatever scratch may hold, it must hold no harm
        for p in range(h.shape[1]):
            h[t, p, int(ranks[row_slot[t], p]) if row_slot[t] >= 0 else 0 :] = NAN
    out = base.clone()
    ops.lora_expand(h, case.arena, case.slices, table, out)

    assert torch.equal(out[row_slot < 0], base[row_slot < 0])
    for t in torch.nonzero(row_slot >= 0)[:, 0].tolist():
        delta = torch.einsum("nk,k->n", case.dense[row_slot[t]], x[t].double())
        expected = base[t].double() + delta
        scale = max(float(delta.abs().max()), float(base[t].abs().max()))
        assert float((out[t].double() - expected).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first_rank", range(1, 257, 16))
def test_every_rank_from_1_to_256_beside_others_gives_the_dense_delta(first_rank: int, dtype: str) -> None:
    ranks = [[r, (7 * r) % 256 + 1, r % 3] for r in range(first_rank, first_rank + 16)]
    case = make_case(ranks, 33, [9, 5, 1], OPS[dtype], seed=first_rank)
    segments = [(slot, 2 * slot, 2 * slot + 1 + slot % 2) for slot in range(16)]
    check(case, segments, 32, OPS[dtype], TOLERANCE[dtype])


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    k=st.integers(1, 70),
    outs=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    row_slot=st.lists(st.integers(-1, 4), max_size=20),
)
def test_any_shape_and_order_of_segments_gives_the_dense_delta(
    data: st.DataObject, k: int, outs: list[int], row_slot: list[int]
) -> None:
    rank = st.integers(0, 20)
    ranks = data.draw(
        st.lists(st.lists(rank, min_size=len(outs), max_size=len(outs)), min_size=5, max_size=5)
    )
    segments = [(slot, t, t + 1) for t, slot in enumerate(row_slot) if slot >= 0]
    segments += [(0, t, t) for t in range(0, len(row_slot), 3)]  # without rows
    case = make_case(ranks, k, outs, OPS["float32"])
    check(case, data.draw(st.permutations(segments)), len(row_slot), OPS["float32"], TOLERANCE["float32"])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_without_segments_nothing_is_read_or_written(rows: int) -> None:
    check(make_case([[4, 4]], 7, [3, 2], OPS["float32"]), [], rows, OPS["float32"], 0)


def test_out_may_be_a_part_of_a_wider_tensor() -> None:
    case = make_case([[4]], 6, [3], OPS["float32"])
    wide = torch.zeros(5, 8)
    x = torch.randn(5, 6)
    segments = torch.tensor([[0, 1, 4]])
    h = OPS["float32"].lora_shrink(x, case.arena, case.slices, segments)
    OPS["float32"].lora_expand(h, case.arena, case.slices, segments, wide[:, 2:5])
    torch.testing.assert_close(
        wide[1:4, 2:5].double(), x[1:4].double() @ case.dense[0].t(), rtol=1e-5, atol=1e-5
    )
    wide[1:4, 2:5] = 0
    assert not wide.any()


@settings(max_examples=200, deadline=None)
@given(
    outs=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    row_slot=st.lists(st.integers(-1, 2), max_size=12),
    absent=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2))),
)
def test_rescale_multiplies_and_shifts_the_columns_of_those_that_have_a_scale_or_a_shift(
    outs: list[int], row_slot: list[int], absent: set[tuple[int, int, int]]
) -> None:
    ends = torch.tensor(outs).cumsum(0).tolist()
    columns = tuple(zip([0, *ends[:-1]], ends, strict=True))
    arena = torch.randn(2 * 3 * ends[-1])
    offsets = torch.full((2, 3, len(outs)), -1)
    base = torch.randn(len(row_slot), ends[-1])
    expected = base.clone()
    for kind in range(2):  # scale before shift
        for slot in range(3):
            for p, (left, right) in enumerate(columns):
                if (kind, slot, p) not in absent:
                    offsets[kind, slot, p] = at = (kind * 3 + slot) * ends[-1] + left
                    vector = arena[at : at + right - left]
                    for t in (t for t, s in enumerate(row_slot) if s == slot):
                        y = expected[t, left:right]
                        expected[t, left:right] = y + vector if kind else y * vector
    none = torch.full_like(offsets[0], 0)
    segments = torch.tensor([(s, t, t + 1) for t, s in enumerate(row_slot) if s >= 0]).long().view(-1, 3)
    out = base.clone()
    OPS["float32"].lora_rescale(arena, LoRASlices(none, none, none, *offsets, columns), segments, out)
    torch.testing.assert_close(out, expected)
    base_rows = torch.tensor(row_slot) < 0
    assert torch.equal(out[base_rows], base[base_rows])


def test_shrink_of_ids_is_shrink_of_rows_with_a_single_one() -> None:
    vocab_size = 33
    case = make_case([[4], [9], [0]], vocab_size, [5], OPS["float32"])
    ids = torch.randint(vocab_size, (7,))
    ids[3:5] = -1  # a base row's id is not looked at
    segments = torch.tensor([[1, 0, 2], [0, 2, 3], [2, 5, 6], [0, 6, 7]])
    h = OPS["float32"].lora_shrink_ids(ids, vocab_size, case.arena, case.slices, segments)
    one_hot = torch.nn.functional.one_hot(ids.clamp(min=0), vocab_size).float()
    dense = OPS["float32"].lora_shrink(one_hot, case.arena, case.slices, segments)
    assert h.shape == dense.shape == (7, 1, 9)
    for slot, first, last in segments.tolist():
        rank = int(case.slices.rank[slot, 0])
        torch.testing.assert_close(h[first:last, 0, :rank], dense[first:last, 0, :rank])


def test_a_packed_weight_can_be_had_back() -> None:
    weight = torch.randn(5, 3)
    ops = OPS["float32"]
    assert torch.equal(ops.unpack_linear(ops.pack_linear(weight.clone())), weight)
