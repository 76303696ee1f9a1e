"""add_lora of the native library: every rank and shape, no row's result a matter of its company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motet.kernels.cpu.ops import CpuOps
from motet.kernels.reference import ReferenceOps
from tests.kernels.cpu.conftest import MakeOps, untouched
from tests.lora_cases import LoRACase, Segments, check_lora, lora_case

DTYPES = (torch.float32, torch.bfloat16)
MIXED = [[16, 16, 16], [1, 0, 3], [256, 7, 64], [0, 33, 0], [8, 8, 8]]


@pytest.fixture(params=DTYPES, ids=str)
def ops(make_ops: MakeOps, request: pytest.FixtureRequest) -> CpuOps:
    return make_ops(request.param)


def added(ops: CpuOps, case: LoRACase, segments: Segments, x: Tensor, out: Tensor) -> Tensor:
    out = out.clone()
    ops.add_lora(x, case.slices, case.plan(ops, segments), out)
    return out


@pytest.mark.parametrize("first_rank", range(1, 257, 32))
def test_every_rank_from_1_to_256_beside_others_gives_the_dense_delta(first_rank: int, ops: CpuOps) -> None:
    ranks = [[r, (7 * r) % 256 + 1, r % 3] for r in range(first_rank, first_rank + 32)]
    case = lora_case(ranks, 33, [19, 40, 1], ops.dtype, seed=first_rank)
    check_lora(case, [(slot, 2 * slot, 2 * slot + 1 + slot % 2) for slot in range(32)], 64, ops, 1e-5)


@pytest.mark.parametrize("in_features", [1, 3, 15, 16, 17, 64, 577])
@pytest.mark.parametrize("outs", [[1], [15], [16, 1], [33, 520], [1100, 7, 64]], ids=str)
def test_any_shape_gives_the_dense_delta_with_scales_and_shifts(
    in_features: int, outs: list[int], ops: CpuOps
) -> None:
    ranks = [[(3 * s + 5 * p) % 18 for p in range(len(outs))] for s in range(4)]
    case = lora_case(ranks, in_features, outs, ops.dtype, seed=in_features, extras=True)
    segments = [(2, 9, 14), (0, 0, 1), (3, 2, 4), (1, 4, 7), (2, 7, 9), (0, 15, 15)]
    check_lora(case, segments, 15, ops, 1e-5)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_without_segments_nothing_is_read_or_written(rows: int, ops: CpuOps) -> None:
    check_lora(lora_case([[4, 4]], 7, [3, 2], ops.dtype), [], rows, ops, 0)


def test_it_agrees_with_the_reference_backend(ops: CpuOps) -> None:
    case = lora_case(MIXED, 70, [90, 30, 40], ops.dtype, extras=True)
    reference = ReferenceOps(torch.device("cpu"), torch.float32)
    expected, x = torch.randn(20, 160), torch.randn(20, 70)
    segments = [(2, 0, 7), (1, 8, 9), (3, 9, 12), (0, 12, 16), (4, 18, 20)]
    out = added(ops, case, segments, x, expected)
    case.arena = case.arena.float()
    reference.add_lora(x, case.slices, case.plan(reference, segments), expected)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ranks", [MIXED, [[r[0]] * 3 for r in MIXED]], ids=["mixed", "one per adapter"])
def test_a_rows_result_is_the_same_to_the_bit_alone_and_in_any_batch(
    threads: int, ranks: list[list[int]], ops: CpuOps, make_ops: MakeOps
) -> None:
    case = lora_case(ranks, 200, [300, 130, 50], ops.dtype, extras=True)
    other = make_ops(ops.dtype, threads)
    generator = torch.Generator().manual_seed(1)
    x, before = (torch.randn(64, n, generator=generator) for n in (200, 480))
    row_slot = torch.arange(64) % len(ranks)
    alone = torch.cat(
        [added(ops, case, [(int(row_slot[t]), 0, 1)], x[t : t + 1], before[t : t + 1]) for t in range(len(x))]
    )
    for size in (2, 3, 5, 8, 31, 64):
        order = torch.randperm(64, generator=generator)[:size]
        order = order[row_slot[order].argsort()]
        slots = row_slot[order].tolist()
        segments = [(s, slots.index(s), slots.index(s) + slots.count(s)) for s in sorted(set(slots))]
        assert torch.equal(added(other, case, segments, x[order], before[order]), alone[order])
    for slot in range(len(ranks)):  # and in one long segment, as a prompt has it
        x64 = x[row_slot == slot].repeat(8, 1)
        before64 = before[row_slot == slot].repeat(8, 1)
        out = added(other, case, [(slot, 0, len(x64))], x64, before64)
        assert torch.equal(out, alone[row_slot == slot].repeat(8, 1))


def test_one_large_adapter_is_shared_out_and_gives_the_same_on_one_and_two_threads(make_ops: MakeOps) -> None:
    case = lora_case([[256], [3]], 300, [1000], torch.float32)
    x, before = torch.randn(3, 300), torch.randn(3, 1000)
    segments = [(0, 0, 2), (1, 2, 3)]
    check_lora(case, segments, 3, make_ops(threads=2), 1e-5)
    one, two = (added(make_ops(threads=n), case, segments, x, before) for n in (1, 2))
    assert torch.equal(one, two)


def test_out_may_be_a_part_of_a_wider_tensor(ops: CpuOps) -> None:
    case = lora_case([[4]], 6, [3], ops.dtype)
    wide = torch.zeros(5, 8)
    x = torch.randn(5, 6)
    ops.add_lora(x, case.slices, case.plan(ops, [(0, 1, 4)]), wide[:, 2:5])
    torch.testing.assert_close(wide[1:4, 2:5], (x[1:4].double() @ case.dense[0].t()).float())
    wide[1:4, 2:5] = 0
    assert not wide.any()


def test_ids_stand_for_rows_with_a_single_one(ops: CpuOps) -> None:
    vocab_size = 333
    case = lora_case([[4], [9], [0]], vocab_size, [50], ops.dtype)
    ids = torch.randint(vocab_size, (7,))
    one_hot = torch.nn.functional.one_hot(ids, vocab_size).float()
    ids[3:5] = -1  # a base row's id is not looked at
    segments = [(1, 0, 2), (0, 2, 3), (2, 5, 6), (0, 6, 7)]
    by_ids, by_rows = (added(ops, case, segments, x, torch.zeros(7, 50)) for x in (ids, one_hot))
    assert by_ids[[0, 1, 2, 6]].any()
    assert torch.equal(by_ids, by_rows)


def test_a_site_where_no_adapter_of_the_step_acts_is_not_looked_at(ops: CpuOps) -> None:
    case = lora_case([[4]], 6, [3], ops.dtype)
    case.table.fill_(1 << 60)
    plan = ops.plan_lora(case.arena, case.table, torch.tensor([True, False]), torch.tensor([[0, 0, 2]]))
    out = torch.ones(2, 3)
    ops.add_lora(torch.randn(2, 6), case.slices, plan, out)
    assert (out == 1).all()


def test_weights_may_lie_further_than_32_bits_reach(make_ops: MakeOps) -> None:
    ops = make_ops(torch.bfloat16)
    case = lora_case([[5]], 20, [30], torch.bfloat16, extras=True)
    arena = untouched((1 << 31) + 10_000, dtype=torch.bfloat16)
    far = (1 << 31) + 77
    arena[far : far + len(case.arena)] = case.arena
    entry = case.table[0, case.slices.first]
    entry += far * (torch.tensor([1, 1, 0, 1, 1]) * (entry >= 0))
    case.arena = arena
    check_lora(case, [(0, 0, 3)], 3, ops, 1e-5)


def test_a_recorded_step_follows_the_adapters_of_the_next(make_ops: MakeOps) -> None:
    ops = make_ops()
    case = lora_case(MIXED, 20, [30, 8, 9], torch.float32)
    weight = ops.pack_linear(torch.randn(47, 20))
    x = torch.randn(6, 20)
    plan = case.plan(ops, [(0, 0, 6)])

    def step() -> Tensor:
        y = ops.linear(x, weight)
        ops.add_lora(x, case.slices, plan, y)
        return y

    with torch.inference_mode():
        replay = ops.record(step, [x, plan.header])
        assert replay is not None
        for segments in ([(1, 0, 2), (4, 3, 6)], [], [(2, 5, 6)], [(s, s, s + 1) for s in range(5)]):
            others = torch.randn(6, 20)
            expected = added(ops, case, segments, others, ops.linear(others, weight))
            next_plan = case.plan(ops, segments)  # alive while it is used
            assert torch.equal(replay([others, next_plan.header]), expected)
