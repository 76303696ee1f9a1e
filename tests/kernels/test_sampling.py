"""Sampling, on the reference backend and on each build of the native one, against transformers' logits warpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from motet.kernels.cpu.library import open_library, usable_isas
from motet.kernels.cpu.ops import CpuOps
from motet.kernels.ops import Ops, SamplingRows
from motet.kernels.philox import uniform
from motet.kernels.reference import ReferenceOps


@pytest.fixture(params=["reference", *usable_isas()])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps(torch.device("cpu"), torch.float32)
    return CpuOps(*open_library(request.param), torch.float32, threads=2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-5, atol=1e-5)


def test_no_rows_are_fine(ops: Ops) -> None:
    assert ops.sample(torch.empty(0, 9), sampling_rows(0)).shape == (0,)
    own, ids, values = ops.logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 2)
    assert (own.shape, ids.shape, values.shape) == ((0,), (0, 2), (0, 2))


def sampling_rows(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: Tensor | None = None,
) -> SamplingRows:
    return SamplingRows(
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.linspace(0, 1 - 2**-24, rows, dtype=torch.float64) if uniform is None else uniform,
    )


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution of transformers' warpers, [V] float64."""
    scores = logits[None].double()
    warpers: list[Callable[[Tensor | None, Tensor], Tensor]] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.0},
    {"top_p": 1e-4},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 3, "top_p": 0.6},
    {"top_p": 0.9, "min_p": 0.3},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 257])
def test_case_26_the_draw_inverts_the_distribution_that_the_filters_of_transformers_leave(
    ops: Ops, filters: dict[str, Any], vocab_size: int
) -> None:
    logits = 3 * random(vocab_size, seed=vocab_size)
    rows = sampling_rows(5000, **filters)
    chosen = ops.sample(logits.expand(5000, -1).clone(), rows)
    expected = warped(logits, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))
    below = torch.cat((torch.zeros(1), expected.cumsum(-1)))
    assert (expected[chosen] > 0).all(), "a token was drawn that the filters cut off"
    # The chosen id's stretch of the cumulative distribution holds the uniform number.
    assert (below[chosen] <= rows.uniform + 1e-9).all()
    assert (below[chosen + 1] >= rows.uniform - 1e-9).all()


def test_rows_of_one_call_keep_their_own_parameters(ops: Ops) -> None:
    greedy = {"temperature": 0.0}
    every = [*FILTERS, greedy, *FILTERS[::-1], greedy]
    logits = 3 * random(len(every), 101)
    singles = [
        sampling_rows(1, **f, uniform=torch.tensor([(i * 0.37) % 1]).double()) for i, f in enumerate(every)
    ]
    alone = [ops.sample(logits[i : i + 1].clone(), rows).item() for i, rows in enumerate(singles)]
    together = SamplingRows(*(torch.cat(column) for column in zip(*singles, strict=True)))
    assert ops.sample(logits.clone(), together).tolist() == alone
    assert alone[len(FILTERS)] == logits[len(FILTERS)].argmax()


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-30}, {"temperature": 1e-45}, {"temperature": 0.0}],
)
def test_case_26_what_leaves_one_token_is_greedy(ops: Ops, filters: dict[str, Any]) -> None:
    logits = 5 * random(64, 1000)
    assert torch.equal(ops.sample(logits.clone(), sampling_rows(64, **filters)), logits.argmax(-1))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 0.0}])
@pytest.mark.parametrize(
    "row",
    [[1.0, 3.0, 3.0, 2.0, 3.0], [0.0] * 5, [0.0, 1e-30, 1e-30, 0.0, -1e-30], [-1e30, -1e30, 0.0, 1e-40, 0.0]],
)
def test_case_26_what_leaves_one_token_is_greedy_with_ties_and_all_but_ties(
    ops: Ops, filters: dict[str, Any], row: list[float]
) -> None:
    logits = torch.tensor([row])
    uniform = torch.tensor([0.999999], dtype=torch.float64)
    assert ops.sample(logits.clone(), sampling_rows(1, **filters, uniform=uniform)).item() == row.index(
        max(row)
    )


def test_min_p_of_one_keeps_the_likeliest_and_its_equals(ops: Ops) -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 4.9999, 5.0]]).expand(300, -1).clone()
    assert set(ops.sample(logits, sampling_rows(300, min_p=1.0)).tolist()) == {1, 2, 4}


def test_top_k_between_equals_keeps_the_smaller_ids(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]]).expand(300, -1).clone()
    assert set(ops.sample(logits, sampling_rows(300, top_k=2)).tolist()) == {0, 1}


def test_top_p_of_one_keeps_even_what_lies_behind_the_last_bit_of_the_sum(ops: Ops) -> None:
    rows = SamplingRows(
        torch.ones(2, dtype=torch.float64),
        *(torch.tensor(column) for column in ([0, 0], [1.0, 0.5], [0.0, 0.0])),
        uniform=torch.zeros(2, dtype=torch.float64),
    )
    assert ops.sample(torch.tensor([[-50.0, 0.0], [-50.0, 0.0]]), rows).tolist() == [0, 1]


def test_extreme_logits_and_uniforms_never_leave_the_vocabulary(ops: Ops) -> None:
    inf = float("inf")
    logits = torch.tensor([[-inf, 0.0, -inf], [-1e38, 3e38, -inf], [-inf, -inf, -3e38], [0.0, -1e4, -inf]])
    for u in (0.0, 1 - 2**-24, 1 - 2**-53):
        for temperature in (1e-40, 1.0, 3e38):
            rows = sampling_rows(4, temperature, uniform=torch.full((4,), u, dtype=torch.float64))
            chosen = ops.sample(logits.clone(), rows)
            assert not logits.gather(-1, chosen[:, None]).isinf().any()


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 8, "top_p": 0.9}])
def test_draws_by_philox_are_as_frequent_as_their_probabilities(ops: Ops, filters: dict[str, Any]) -> None:
    n = 40_000
    logits = random(20, seed=5)
    p = warped(logits, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))
    numbers = torch.from_numpy(uniform(np.full(n, 99, np.uint64), np.arange(n, dtype=np.uint64)))
    chosen = ops.sample(logits.expand(n, -1).clone(), sampling_rows(n, **filters, uniform=numbers))
    counts = torch.bincount(chosen, minlength=20)
    assert counts[p == 0].sum() == 0
    possible = p > 0
    chi_square = ((counts - n * p)[possible] ** 2 / (n * p[possible])).sum()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_uniforms_are_philoxs(ops: Ops) -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 0x123456789ABCDEF], np.uint64)
    positions = np.array([0, 7, 2**31, 2**40 + 3, 2**63 - 1], np.uint64)
    choices = np.array([0, 1, 0, 127, 2**32 - 1], np.uint64)
    words = (torch.from_numpy(x.view(np.int64)) for x in (seeds, positions, choices))
    numbers = ops.uniform(*words)
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == uniform(seeds, positions, choices).tolist()
    none = torch.empty(0, dtype=torch.int64)
    assert ops.uniform(none, none, none).shape == (0,)


def test_sampling_leaves_other_rows_logits_alone(ops: Ops) -> None:
    logits = random(6, 50)
    rows = SamplingRows(
        torch.tensor([0.0, 1.0] * 3, dtype=torch.float64),
        torch.full((6,), 3),
        torch.full((6,), 0.5),
        torch.zeros(6),
        torch.full((6,), 0.5, dtype=torch.float64),
    )
    chosen = ops.sample(logits.clone(), rows)
    assert torch.equal(chosen[::2], logits[::2].argmax(-1))


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 5000])
def test_greedy_takes_the_first_of_the_largest_and_sees_what_is_not_finite(ops: Ops, vocab_size: int) -> None:
    inf, nan = float("inf"), float("nan")
    logits = random(12, vocab_size).round()  # whole numbers: full of equals
    faulty = {1: inf, 4: -inf, 7: nan, 11: inf}
    for i, (row, fault) in enumerate(faulty.items()):
        logits[row, (vocab_size - 1) * i // 3] = fault
    logits[8] = 3e38  # their sum is not finite
    ids, finite = ops.greedy(logits)
    assert [i for i in range(12) if not finite[i]] == list(faulty)
    for i, row in enumerate(logits.tolist()):
        assert 0 <= ids[i] < vocab_size
        assert i in faulty or ids[i] == row.index(max(row))
    ids, finite = ops.greedy(logits[:0])
    assert ids.shape == finite.shape == (0,)


@pytest.mark.parametrize("k", [0, 1, 5, 30])
def test_logprobs_are_those_of_the_logits_likeliest_first(ops: Ops, k: int) -> None:
    logits, chosen = 4 * random(9, 30), torch.arange(9) * 3
    own, ids, values = ops.logprobs(logits, chosen, k)
    oracle = logits.double().log_softmax(-1)
    assert_close(own, oracle[torch.arange(9), chosen])
    assert ids.shape == values.shape == (9, k)
    assert_close(values, oracle.sort(-1, descending=True).values[:, :k])
    assert_close(values, oracle.gather(-1, ids))
