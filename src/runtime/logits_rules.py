"""LogitsRules at work: penalties, biases, bans and the application's processors, over the rows that have some.

All rows that ask go together through a few gathers and scatters, which cost little more than a copy of those
rows and so need no kernel of their own. Rows that do not ask are not looked at.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf, isfinite
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch import Tensor

from motet.errors import RequestFailed
from motet.params import LogitsProcessor
from motet.runtime.scheduler_output import LogitsRules


class RequestRules:
    """One request's rules, and what they look at: its tokens so far."""

    def __init__(self, rules: LogitsRules, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.spec = rules
        self.token_ids = list(token_ids[:num_prompt_tokens])
        self.output_counts: dict[int, int] = {}
        """Of each token that some penalty is for, how often it stands in the output."""
        if rules.repetition_penalty != 1:
            self.output_counts = dict.fromkeys(self.token_ids, 0)
        self.bias_ids = torch.tensor([token_id for token_id, _ in rules.logit_bias], dtype=torch.int64)
        self.bias = torch.tensor([added for _, added in rules.logit_bias], dtype=torch.float32)
        self._forbidden: Tensor | None = None
        alone = [word[0] for word in rules.bad_words if len(word) == 1]
        self._always_banned = torch.tensor(alone, dtype=torch.int64)
        self._longer_words: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """By the token before their last."""
        for word in rules.bad_words:
            if len(word) > 1:
                self._longer_words[word[-2]].append(word)
        self._penalizes = (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty) != (
            1,
            0,
            0,
        )
        for token_id in token_ids[num_prompt_tokens:]:
            self.note(token_id)

    def note(self, token_id: int) -> None:
        """Takes in the output's next token."""
        self.token_ids.append(token_id)
        if self._penalizes:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def forbidden(self, vocab_size: int) -> Tensor | None:
        """[V] bool: what `allowed_token_ids` leave out; None if they are not given. Made once, at the first step."""
        if self._forbidden is None and self.spec.allowed_token_ids is not None:
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool)
            self._forbidden[torch.tensor(self.spec.allowed_token_ids, dtype=torch.int64)] = False
        return self._forbidden

    @property
    def banned(self) -> Tensor:
        """[n] int64: the tokens that would now complete a bad word."""
        known = self.token_ids
        words = self._longer_words.get(known[-1], ())
        completing = [
            w[-1] for w in words if len(w) <= len(known) + 1 and tuple(known[1 - len(w) :]) == w[:-1]
        ]
        if not completing:
            return self._always_banned
        return torch.cat((self._always_banned, torch.tensor(completing)))

    def process(self, row: Tensor) -> Tensor:
        """What the processors make of the row [V] float32, which they may change. Raises RequestFailed."""
        shape, device = row.shape, row.device
        for i, processor in enumerate(self.spec.processors):
            name = f"logits_processors[{i}] ({_name(processor)})"
            try:
                row = processor(torch.tensor(self.token_ids, device=device), row)
                wrong = _what_is_wrong(row, shape, device)
            except BaseException as exc:  # whatever it raises, or what it returns, concerns its request alone
                raise _failure(name, exc) from exc
            if wrong is not None:
                raise RequestFailed(
                    f"{name} returned {wrong}; expected a float32 tensor of shape [{shape[0]}] on {device} "
                    "with at least one finite number, and neither NaN nor +inf"
                )
        return row


def apply_rules(
    logits: Tensor, ruled: Sequence[tuple[int, RequestRules]]
) -> tuple[Tensor, dict[int, RequestFailed]]:
    """logits [R, V] float32 with the rules of some rows applied, and the errors of the rows whose rules failed.

    `ruled`: (row, its rules). The given logits stay as they are; a failed row becomes zeros.
    """
    if not ruled:
        return logits, {}
    index = torch.tensor([row for row, _ in ruled], device=logits.device)
    rules = [own for _, own in ruled]
    rows = logits[index]  # a copy
    _penalize(rows, rules)
    _bias(rows, rules)
    _ban(rows, rules)
    faults: dict[int, RequestFailed] = {}
    for i, largest in enumerate(rows.amax(-1).tolist()):  # where there is a NaN, that
        try:
            if not isfinite(largest):
                raise RequestFailed(_NONE_IS_LEFT if largest == -inf else _NOT_FINITE)
            if rules[i].spec.processors:
                rows[i] = rules[i].process(rows[i].clone())
        except RequestFailed as error:
            faults[ruled[i][0]] = error.with_traceback(None)  # whoever keeps it must not keep the weights
            rows[i] = 0.0
    return logits.index_copy(0, index, rows), faults


_NONE_IS_LEFT = (
    "no token is left to choose: allowed_token_ids, without what would complete one of the bad_words and without "
    "the end tokens while min_tokens are to come, is empty; allow more or forbid less"
)
_NOT_FINITE = "repetition_penalty made logits that are not finite: set it nearer to 1"


def _penalize(rows: Tensor, rules: Sequence[RequestRules]) -> None:
    counts = [own.output_counts for own in rules]
    if not any(counts):
        return
    row, token = _places([torch.tensor(list(c), dtype=torch.int64) for c in counts], rows.device)
    count = torch.tensor([n for c in counts for n in c.values()], dtype=torch.float32, device=rows.device)

    def of_each(penalty: Callable[[LogitsRules], float]) -> Tensor:
        return torch.tensor([penalty(own.spec) for own in rules], dtype=torch.float32, device=rows.device)[
            row
        ]

    repetition = of_each(lambda spec: spec.repetition_penalty)
    logits = rows[row, token]
    logits = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits -= of_each(lambda spec: spec.frequency_penalty) * count
    logits -= of_each(lambda spec: spec.presence_penalty) * (count > 0)
    rows[row, token] = logits


def _bias(rows: Tensor, rules: Sequence[RequestRules]) -> None:
    places = _places([own.bias_ids for own in rules], rows.device)
    if len(places[0]):
        rows[places] += torch.cat([own.bias for own in rules]).to(rows.device)


def _ban(rows: Tensor, rules: Sequence[RequestRules]) -> None:
    masks = {i: mask for i, own in enumerate(rules) if (mask := own.forbidden(rows.shape[1])) is not None}
    if masks:
        index = torch.tensor(list(masks), device=rows.device)
        rows[index] = rows[index].masked_fill_(torch.stack(list(masks.values())).to(rows.device), -inf)
    rows[_places([own.banned for own in rules], rows.device)] = -inf


def _places(tokens: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, token id) of all of them; `tokens`: those of each row, [n] int64."""
    sizes = torch.tensor([len(t) for t in tokens])
    row = torch.arange(len(tokens)).repeat_interleave(sizes)
    return row.to(device), torch.cat(list(tokens)).to(device)


_NAMED = (FunctionType, MethodType, BuiltinFunctionType, type)


def _name(processor: LogitsProcessor) -> str:
    named = processor if isinstance(processor, _NAMED) else type(processor)
    return named.__qualname__


def _failure(name: str, exc: BaseException) -> RequestFailed:
    what = "".join(traceback.format_exception_only(exc)).strip()
    last = traceback.extract_tb(exc.__traceback__)[-1]
    exc.__traceback__ = None  # its frames lead to those of the engine, and so to the weights
    return RequestFailed(f"{name} raised {what} (in {last.name}, {last.filename}:{last.lineno})")


def _what_is_wrong(row: object, shape: torch.Size, device: torch.device) -> str | None:
    """What a processor returned, unless it is a row to choose from."""
    if type(row) is not Tensor:  # of a kind of its own it may answer anything
        return f"a {type(row).__name__}"
    if (
        row.shape != shape
        or row.dtype != torch.float32
        or row.device != device
        or row.layout != torch.strided
    ):
        return f"a {row.dtype} tensor of shape {list(row.shape)} on {row.device} ({row.layout})"
    largest = row.amax().item()
    if isfinite(largest):
        return None
    return "-inf for every token" if largest == -inf else f"a row with {largest}"
