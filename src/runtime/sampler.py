"""From logits to tokens: a pure function of the logits and of each request's own parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from motet.errors import RequestFailed
from motet.kernels.ops import Ops, SamplingRows
from motet.runtime.logits_rules import RequestRules, apply_rules
from motet.runtime.scheduler_output import Sample, SamplingSpec

Row = tuple[SamplingSpec, int]
"""How to choose, and the index of the output token that is chosen."""

_NOT_FINITE = "the model's logits are not finite; are the adapter's weights sound?"


class Choice(NamedTuple):
    """What R rows of logits have led to, once the ops are done."""

    token_ids: Tensor
    """[R] int64."""
    finite: Tensor
    """[R] bool: whether all of the row's logits are."""
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    """As `Ops.logprobs` gives them, of the rows that ask for some, in order; None: none does."""


def is_plain(rows: Sequence[Row], ruled: Sequence[tuple[int, RequestRules]]) -> bool:
    """Whether nothing changes the logits before tokens are chosen, so that `choose` alone will do."""
    return not ruled and not _early(rows)


def choose(ops: Ops, logits: Tensor, rows: Sequence[Row], possible: Tensor | None = None) -> Choice:
    """One token for each row of logits [R, V] float32, by ops alone: none of them waits for another's result.

    possible: the same logits changed by rules; None: nothing has changed them.
    """
    token_ids, finite = ops.greedy(logits)
    if possible is not None or any(spec.temperature for spec, _ in rows):
        token_ids = ops.sample(logits if possible is None else possible, _sampling_rows(ops, rows))
    asking = _asking(rows)
    if not asking:
        return Choice(token_ids, finite, None)
    index = torch.from_numpy(np.array([i for i, _ in asking]))
    of_asking = torch.empty_like(index)
    ops.fill_sampled(of_asking, token_ids, index)
    most = max(k for _, k in asking)
    return Choice(token_ids, finite, ops.logprobs(ops.take_rows(logits, index), of_asking, most))


def samples_of(choice: Choice, rows: Sequence[Row]) -> list[Sample | RequestFailed]:
    """What a choice means for each row: a token, or why it has none."""
    token_ids = choice.token_ids.tolist()
    samples: list[Sample | RequestFailed] = [Sample(token_id) for token_id in token_ids]
    if choice.logprobs is not None:
        columns = (column.tolist() for column in choice.logprobs)
        for (i, k), own, ids, values in zip(_asking(rows), *columns, strict=True):
            top = dict(zip(ids[:k], values[:k], strict=True))
            samples[i] = Sample(token_ids[i], own, top | {token_ids[i]: own})
    for i, is_finite in enumerate(choice.finite.tolist()):
        if not is_finite:
            samples[i] = RequestFailed(_NOT_FINITE)
    return samples


def sample(
    ops: Ops, logits: Tensor, rows: Sequence[Row], ruled: Sequence[tuple[int, RequestRules]] = ()
) -> list[Sample | RequestFailed]:
    """One token for each row of logits [R, V] float32, or why it has none.

    `ruled`: the rules of the rows that have some, by index, in order.
    """
    if is_plain(rows, ruled):
        return samples_of(choose(ops, logits, rows), rows)
    _, finite = ops.greedy(logits)
    sound = logits if finite.all() else logits.masked_fill(~finite[:, None], 0.0)
    possible = _without_early_ends(sound, rows)
    possible, faults = apply_rules(possible, [(i, rules) for i, rules in ruled if finite[i]])
    choice = choose(ops, sound, rows, possible)
    samples = samples_of(choice._replace(finite=finite), rows)
    for i, fault in faults.items():
        samples[i] = fault
    return samples


def _asking(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """(which row, of how many ids) for those that ask for log-probabilities."""
    return [(i, spec.logprobs) for i, (spec, _) in enumerate(rows) if spec.logprobs is not None]


def _early(rows: Sequence[Row]) -> list[int]:
    """Those before which fewer than `min_tokens` tokens stand."""
    return [i for i, (spec, index) in enumerate(rows) if index < spec.min_tokens and spec.end_token_ids]


def _without_early_ends(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Makes end tokens impossible in early rows."""
    early = _early(rows)
    if early:
        logits = logits.clone()
        ends = [rows[i][0].end_token_ids for i in early]
        row = np.repeat(early, [len(of_row) for of_row in ends])
        token = np.fromiter(itertools.chain(*ends), np.int64, len(row))
        logits[torch.from_numpy(row), torch.from_numpy(token)] = float("-inf")
    return logits


def _sampling_rows(ops: Ops, rows: Sequence[Row]) -> SamplingRows:
    specs = [spec for spec, _ in rows]

    def column(values: Iterable[float], dtype: type[np.generic]) -> Tensor:
        # By numpy: torch.tensor takes several times as long for a few numbers.
        return torch.from_numpy(np.fromiter(values, dtype, len(specs)))

    # Seeds are unsigned, which torch knows little of: their bits travel as int64.
    seeds = torch.from_numpy(np.fromiter((spec.seed for spec in specs), np.uint64, len(specs)).view(np.int64))
    positions = column((index for _, index in rows), np.int64)
    choices = column((spec.choice for spec in specs), np.int64)
    return SamplingRows(
        temperature=column((spec.temperature for spec in specs), np.float64),
        top_k=column((spec.top_k for spec in specs), np.int64),
        top_p=column((spec.top_p for spec in specs), np.float32),
        min_p=column((spec.min_p for spec in specs), np.float32),
        uniform=ops.uniform(seeds, positions, choices),
    )


def prompt_logprobs(
    ops: Ops, logits: Tensor, token_ids: Sequence[int], k: int
) -> tuple[dict[int, float], ...] | RequestFailed:
    """For each row of logits [R, V] float32: log-probabilities of the k likeliest ids and of that row's of R."""
    if not bool(ops.greedy(logits)[1].all()):
        return RequestFailed(_NOT_FINITE)
    own, top_ids, top = ops.logprobs(logits, torch.tensor(token_ids), k)
    per_row = zip(token_ids, own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    return tuple(dict(zip(ids, values, strict=True)) | {t: of_t} for t, of_t, ids, values in per_row)
