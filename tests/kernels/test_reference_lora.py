"""add_lora of the reference backend against dense products in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.reference import ReferenceOps
from tests.lora_cases import check_lora, lora_case

OPS = {dtype: ReferenceOps(torch.device("cpu"), dtype) for dtype in (torch.float32, torch.bfloat16)}
FLOAT32 = OPS[torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", OPS)
@pytest.mark.parametrize("first_rank", range(1, 257, 16))
def test_every_rank_from_1_to_256_beside_others_gives_the_dense_delta(
    first_rank: int, dtype: torch.dtype
) -> None:
    ranks = [[r, (7 * r) % 256 + 1, r % 3] for r in range(first_rank, first_rank + 16)]
    case = lora_case(ranks, 33, [9, 5, 1], dtype, seed=first_rank)
    segments = [(slot, 2 * slot, 2 * slot + 1 + slot % 2) for slot in range(16)]
    check_lora(case, segments, 32, OPS[dtype], TOLERANCE[dtype])


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    k=st.integers(1, 70),
    outs=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    row_slot=st.lists(st.integers(-1, 4), max_size=20),
    extras=st.booleans(),
)
def test_any_shape_and_order_of_segments_gives_the_dense_delta_with_scales_and_shifts(
    data: st.DataObject, k: int, outs: list[int], row_slot: list[int], extras: bool
) -> None:
    rank = st.integers(0, 20)
    ranks = data.draw(
        st.lists(st.lists(rank, min_size=len(outs), max_size=len(outs)), min_size=5, max_size=5)
    )
    segments = [(slot, t, t + 1) for t, slot in enumerate(row_slot) if slot >= 0]
    segments += [(0, t, t) for t in range(0, len(row_slot), 3)]  # without rows
    case = lora_case(ranks, k, outs, torch.float32, extras=extras)
    check_lora(case, data.draw(st.permutations(segments)), len(row_slot), FLOAT32, 1e-5)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_without_segments_nothing_is_read_or_written(rows: int) -> None:
    check_lora(lora_case([[4, 4]], 7, [3, 2], torch.float32), [], rows, FLOAT32, 0)


def test_out_may_be_a_part_of_a_wider_tensor() -> None:
    case = lora_case([[4]], 6, [3], torch.float32)
    wide = torch.zeros(5, 8)
    x = torch.randn(5, 6)
    FLOAT32.add_lora(x, case.slices, case.plan(FLOAT32, [(0, 1, 4)]), wide[:, 2:5])
    torch.testing.assert_close(
        wide[1:4, 2:5].double(), x[1:4].double() @ case.dense[0].t(), rtol=1e-5, atol=1e-5
    )
    wide[1:4, 2:5] = 0
    assert not wide.any()


def test_ids_stand_for_rows_with_a_single_one() -> None:
    vocab_size = 33
    case = lora_case([[4], [9], [0]], vocab_size, [5], torch.float32)
    ids = torch.randint(vocab_size, (7,))
    one_hot = torch.nn.functional.one_hot(ids, vocab_size).float()
    ids[3:5] = -1  # a base row's id is not looked at
    plan = case.plan(FLOAT32, [(1, 0, 2), (0, 2, 3), (2, 5, 6), (0, 6, 7)])
    by_ids, by_rows = torch.zeros(2, 7, 5)
    FLOAT32.add_lora(ids, case.slices, plan, by_ids)
    FLOAT32.add_lora(one_hot, case.slices, plan, by_rows)
    assert by_ids[[0, 1, 2, 6]].all()
    torch.testing.assert_close(by_ids, by_rows)


def test_a_site_where_no_adapter_of_the_step_acts_is_not_looked_at() -> None:
    case = lora_case([[4]], 6, [3], torch.float32)
    case.table.fill_(1 << 60)
    plan = FLOAT32.plan_lora(case.arena, case.table, torch.tensor([True, False]), torch.tensor([[0, 0, 2]]))
    out = torch.ones(2, 3)
    FLOAT32.add_lora(torch.randn(2, 6), case.slices, plan, out)
    assert (out == 1).all()


def test_a_packed_weight_can_be_had_back() -> None:
    weight = torch.randn(5, 3)
    assert torch.equal(FLOAT32.unpack_linear(FLOAT32.pack_linear(weight.clone())), weight)
