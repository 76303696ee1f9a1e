"""Sampling of the native backend: the same choices as the reference's, on vocabularies of every kind and size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from motet.kernels.ops import SamplingRows
from motet.kernels.reference import ReferenceOps
from tests.kernels.cpu.conftest import MakeOps

REFERENCE = ReferenceOps(torch.device("cpu"), torch.float32)
INF = float("inf")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(n: int, seed: int = 0) -> SamplingRows:
    """Every mixture of filters."""

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (n,), generator=generator(seed + len(values)))]

    return SamplingRows(
        temperature=one_of(0.0, 1e-30, 0.1, 0.7, 1.0, 1.5, 40.0).double(),
        top_k=one_of(0, 0, 1, 2, 40, 191, 300, 4000).long(),
        # No round numbers: n of m equals have a share that the reference, which divides, rounds to either side of one.
        top_p=one_of(1.0, 1.0, 0.0, 0.051234, 0.512347, 0.912347, 0.951234, 0.999123, 1 - 2**-24),
        min_p=one_of(0.0, 0.0, 0.0, 0.02, 0.5),
        uniform=torch.rand(n, dtype=torch.float64, generator=generator(seed)),
    )


def normal(n: int, v: int) -> Tensor:
    return 3 * torch.randn(n, v, generator=generator(v))


def whole(n: int, v: int) -> Tensor:
    """Few values, each many times."""
    return normal(n, v).round()


def impossible(n: int, v: int) -> Tensor:
    """Half of all tokens, and more and more of them."""
    share = torch.linspace(0.5, 1, n)[:, None]
    x = normal(n, v).masked_fill(torch.rand(n, v, generator=generator(1)) < share, -INF)
    x[:, v // 2] = 1.0  # one is left
    return x


def clustered(n: int, v: int) -> Tensor:
    """Distances of every magnitude: no pivot between the least and the largest cuts many off."""
    return -torch.logspace(-35, 35, v)[torch.randperm(v, generator=generator(2))].expand(n, -1).contiguous()


def extreme(n: int, v: int) -> Tensor:
    return (normal(n, v) * 1e38).clamp(-3e38, 3e38)


KINDS: list[Callable[[int, int], Tensor]] = [normal, whole, impossible, clustered, extreme]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("vocab_size", [1, 2, 9, 255, 256, 257, 1000, 49152])
def test_choices_are_the_references(make_ops: MakeOps, kind: Callable, vocab_size: int) -> None:
    n = 12 if vocab_size == 49152 else 200
    logits, rows = kind(n, vocab_size), random_rows(n)
    assert torch.equal(make_ops().sample(logits, rows), REFERENCE.sample(logits, rows))


@pytest.mark.parametrize("top_k", [0, 7, 700])
@pytest.mark.parametrize("top_p", [0.125, 0.5, 1.0])
def test_among_equals_the_smaller_ids_are_kept(make_ops: MakeOps, top_k: int, top_p: float) -> None:
    # 1024 equals behind 1000 impossible ones: their shares are exact.
    logits = torch.full((64, 2024), -INF)
    logits[:, 1000:] = 2.5
    kept = top_k or 1024
    kept = -(-kept * int(top_p * 8) // 8)
    uniform = torch.linspace(0, 1 - 2**-53, 64, dtype=torch.float64)
    ones = torch.ones(64)
    rows = SamplingRows(ones.double(), (ones * top_k).long(), ones * top_p, ones * 0, uniform)
    expected = 1000 + (uniform * kept).floor().long().clamp(max=kept - 1)
    assert torch.equal(make_ops().sample(logits, rows), expected)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_where_nothing_is_possible_some_id_is_chosen(make_ops: MakeOps, uniform: float) -> None:
    rows = random_rows(40)._replace(uniform=torch.full((40,), uniform, dtype=torch.float64))
    for fault in (-INF, float("nan"), INF):
        chosen = make_ops().sample(torch.full((40, 700), fault), rows)
        assert ((chosen >= 0) & (chosen < 700)).all()


@pytest.mark.parametrize("unsound", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("vocab_size", [5, 3000])
def test_unsound_rows_get_some_id_and_touch_no_other(
    make_ops: MakeOps, unsound: float, vocab_size: int
) -> None:
    ops = make_ops()
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    rows = SamplingRows(
        temperature=torch.tensor([1.0, 1.0, 0.0, 0.7, 1.0, 1.5, 1.0, 2.0, 1.0], dtype=torch.float64),
        top_k=torch.tensor([0, 3, 0, 2, 0, 4, 0, 0, 1]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 0.3, 1.0, 0.9, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.0, 0.0]),
        uniform=torch.full((9,), 0.6, dtype=torch.float64),
    )
    expected = ops.sample(logits, rows)
    of_all = ops.logprobs(logits, expected, 4)
    for spoil in (slice(0, 1), slice(None, None, 2), slice(None)):
        for some in (slice(0, 1), slice(None)):
            spoiled = logits.clone()
            spoiled[spoil, some] = unsound
            chosen = ops.sample(spoiled, rows)
            assert ((chosen >= 0) & (chosen < vocab_size)).all()
            logprobs = ops.logprobs(spoiled, chosen, 4)
            assert ((logprobs[1] >= 0) & (logprobs[1] < vocab_size)).all()
            sound = torch.ones(9, dtype=torch.bool)
            sound[spoil] = False
            assert torch.equal(chosen[sound], expected[sound])
            for spoiled_column, column in zip(logprobs, of_all, strict=True):
                assert torch.equal(spoiled_column[sound], column[sound])


def test_memory_around_the_logits_does_not_matter(make_ops: MakeOps) -> None:
    rows = random_rows(30)
    around = torch.full((30 * 333 + 128,), float("nan"))
    logits = around[64:-64].view(30, 333)
    logits.copy_(normal(30, 333))
    assert torch.equal(make_ops().sample(logits, rows), REFERENCE.sample(logits, rows))
    assert make_ops().greedy(logits)[1].all()


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_a_row_is_chosen_alike_alone_in_any_batch_on_any_threads(make_ops: MakeOps, vocab_size: int) -> None:
    logits, rows = normal(64, vocab_size), random_rows(64)
    one, two = make_ops(threads=1), make_ops(threads=2)
    alone = [one.sample(logits[i : i + 1], SamplingRows(*(x[i : i + 1] for x in rows))) for i in range(64)]
    own = [one.logprobs(logits[i : i + 1], alone[i], 5) for i in range(64)]
    for n in (0, 1, 2, 17, 64):
        for ops in (one, two):
            chosen = ops.sample(logits[:n], SamplingRows(*(x[:n] for x in rows)))
            assert torch.equal(ops.greedy(logits[:n])[0], logits[:n].argmax(-1))
            assert chosen.tolist() == torch.cat([*alone[:n], torch.empty(0)]).tolist()
            for i, together in enumerate(ops.logprobs(logits[:n], chosen, 5)):
                assert torch.equal(together, torch.cat([x[i] for x in own])[:n])


@pytest.mark.parametrize("kind", [normal, whole], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("vocab_size", [1, 9, 257, 20_000])
@pytest.mark.parametrize("k", [0, 1, 5, 200])
def test_logprobs_are_the_references_and_equals_stand_by_id(
    make_ops: MakeOps, kind: Callable, vocab_size: int, k: int
) -> None:
    k = min(k, vocab_size)
    logits = kind(5, vocab_size)
    chosen = torch.arange(5) % vocab_size
    own, ids, top = make_ops().logprobs(logits, chosen, k)
    oracle = logits.double().log_softmax(-1)
    torch.testing.assert_close(own, oracle[torch.arange(5), chosen].float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(ids, logits.argsort(dim=-1, descending=True, stable=True)[:, :k])
    torch.testing.assert_close(top, oracle.gather(-1, ids).float(), rtol=1e-6, atol=1e-6)
