"""From logits to tokens: a pure function of the logits and of each request's own parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

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


def sample(
    ops: Ops, logits: Tensor, rows: Sequence[Row], ruled: Sequence[tuple[int, RequestRules]] = ()
) -> list[Sample | RequestFailed]:
    """One token for each row of logits [R, V] float32, or why it has none.

    `ruled`: the rules of the rows that have some, by index, in order.
    """
    likeliest, finite = ops.greedy(logits)
    is_finite = finite.tolist()
    sound = logits if all(is_finite) else logits.masked_fill(~finite[:, None], 0.0)
    possible = _without_early_ends(sound, rows)
    faults = {i: RequestFailed(_NOT_FINITE) for i, fine in enumerate(is_finite) if not fine}
    if ruled:
        possible, of_rules = apply_rules(possible, [(i, rules) for i, rules in ruled if is_finite[i]])
        faults |= of_rules
    if possible is logits and not any(spec.temperature for spec, _ in rows):
        chosen = likeliest
    else:
        chosen = ops.sample(possible, _sampling_rows(ops, rows))
    samples: list[Sample | RequestFailed] = [Sample(token_id) for token_id in chosen.tolist()]
    for i, with_logprobs in _with_logprobs(ops, sound, chosen, rows).items():
        samples[i] = with_logprobs
    for i, fault in faults.items():
        samples[i] = fault
    return samples


def _without_early_ends(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Makes end tokens impossible while fewer than `min_tokens` tokens stand before the chosen one."""
    early = [i for i, (spec, index) in enumerate(rows) if index < spec.min_tokens and spec.end_token_ids]
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


def _with_logprobs(ops: Ops, logits: Tensor, chosen: Tensor, rows: Sequence[Row]) -> dict[int, Sample]:
    """The samples of the rows that ask for log-probabilities: of the model's own distribution."""
    asking = [(i, spec.logprobs) for i, (spec, _) in enumerate(rows) if spec.logprobs is not None]
    if not asking:
        return {}
    index = torch.tensor([i for i, _ in asking])
    of_chosen, top_ids, top = ops.logprobs(logits[index], chosen[index], max(k for _, k in asking))
    samples = {}
    for (i, k), token_id, own, ids, values in zip(
        asking, chosen[index].tolist(), of_chosen.tolist(), top_ids.tolist(), top.tolist(), strict=True
    ):
        samples[i] = Sample(token_id, own, dict(zip(ids[:k], values[:k], strict=True)) | {token_id: own})
    return samples
