"""The rules for logits: batched rows beside transformers' processors, and faults that stay in their row."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes import make_sampling
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from motet.errors import RequestFailed
from motet.kernels.ops import select_ops
from motet.params import LogitsProcessor
from motet.runtime.logits_rules import RequestRules, apply_rules
from motet.runtime.sampler import sample
from motet.runtime.scheduler_output import LogitsRules, Sample
from strategies import FEW

VOCAB_SIZE = 12
INF = float("inf")

tokens = st.integers(0, VOCAB_SIZE - 1)
penalties = st.sampled_from([0.0, 0.5, -1.25, 2.0])
specs = st.builds(
    LogitsRules,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 4.0]),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32)).map(lambda d: tuple(d.items())),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=9).map(tuple),
)
texts = st.tuples(st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, max_size=12))


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def ruled(spec: LogitsRules, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> RequestRules:
    return RequestRules(spec, (*prompt, *output), len(prompt))


def changed_by_the_oracle(row: Tensor, spec: LogitsRules, prompt: list[int], output: list[int]) -> Tensor:
    """transformers' processors where it has one, and OpenAI's formula of the two others, a token at a time."""
    ids = torch.tensor([prompt + output])
    row = RepetitionPenaltyLogitsProcessor(spec.repetition_penalty)(ids, row[None])[0].clone()
    for token in set(output):
        row[token] -= spec.frequency_penalty * output.count(token)
        row[token] -= spec.presence_penalty
    for token, added in spec.logit_bias:
        row[token] += added
    if spec.bad_words:
        row = NoBadWordsLogitsProcessor([list(word) for word in spec.bad_words])(ids, row[None])[0]
    if spec.allowed_token_ids is not None:
        row = torch.tensor([v if i in spec.allowed_token_ids else -INF for i, v in enumerate(row.tolist())])
    return row


@FEW
@given(st.lists(st.tuples(specs, texts, st.integers(0, 2)), min_size=1, max_size=5), st.data())
def test_rules_of_mixed_rows_are_those_of_transformers_in_each_row(
    cases: list[tuple[LogitsRules, tuple[list[int], list[int]], int]], data: st.DataObject
) -> None:
    """Whatever part of the output was there when the request was made known, and whatever came one by one."""
    rows, asking, expected = 0, [], {}
    for spec, (prompt, output), plain_rows_before in cases:
        rows += plain_rows_before + 1
        known = data.draw(st.integers(0, len(output)))
        rules = ruled(spec, prompt, output[:known])
        for token in output[known:]:
            rules.note(token)
        asking.append((rows - 1, rules))
        expected[rows - 1] = (spec, prompt, output)
    logits = logits_of(rows)
    before = logits.clone()
    after, faults = apply_rules(logits, asking)
    assert torch.equal(logits, before), "log-probabilities are taken from these"
    for i in range(rows):
        theirs = changed_by_the_oracle(before[i], *expected[i]) if i in expected else before[i]
        if theirs.max() == -INF:
            assert "no token is left to choose" in str(faults.pop(i))
            continue
        assert torch.equal(after[i].isinf(), theirs.isinf())
        finite = theirs.isfinite()
        torch.testing.assert_close(after[i][finite], theirs[finite], rtol=1e-6, atol=1e-5)
        if i not in expected:
            assert torch.equal(after[i], theirs)
    assert not faults


def test_rows_whose_rules_failed_are_named_and_the_rest_go_on() -> None:
    logits = logits_of(4)
    nothing = ruled(LogitsRules(bad_words=((1, 3),), allowed_token_ids=(3,)))
    extreme = ruled(LogitsRules(repetition_penalty=1e-38), prompt=range(VOCAB_SIZE))
    fine = ruled(LogitsRules(allowed_token_ids=(3,)))
    after, faults = apply_rules(1e3 * logits, [(0, nothing), (2, extreme), (3, fine)])
    assert set(faults) == {0, 2}
    assert "no token is left to choose" in str(faults[0])
    assert "repetition_penalty made logits that are not finite" in str(faults[2])
    assert after[3].argmax() == 3 and torch.equal(after[1], 1e3 * logits[1])
    assert after.sum(-1)[:3].isfinite().all(), "what failed cannot spoil the draw of the others"


# -- processors ------------------------------------------------------------------------------------------------


def chosen(
    processors: Sequence[LogitsProcessor], rows: int = 3, logprobs: int | None = None, **rules: Any
) -> list[Sample | RequestFailed]:
    """Greedy choices of some rows, of which the second has the processors."""
    specs = [(make_sampling(), 0)] * rows
    own = ruled(LogitsRules(processors=tuple(processors), **rules), (4, 5), (6,))
    ops = select_ops("cpu", "float32")
    return sample(ops, logits_of(rows), specs, [(1, own)])


def test_a_processor_gets_the_ids_so_far_and_the_row_as_all_other_rules_leave_it() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def watch(token_ids: Tensor, logits: Tensor) -> Tensor:
        seen.append((token_ids, logits))
        return logits

    def others(token_ids: Tensor, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits)

    chosen([watch, others], bad_words=((2,), (6, 7), (5, 8)), logit_bias=((3, 50.0),))
    ((token_ids, row),) = seen
    assert token_ids.dtype == torch.int64 and token_ids.tolist() == [4, 5, 6]
    assert row.dtype == torch.float32
    expected = logits_of(3)[1]
    expected[[2, 7]] = -INF
    expected[3] += 50
    assert torch.equal(row, expected), "its own, also when it keeps it"


def test_processors_follow_each_other_and_the_last_has_the_last_word() -> None:
    def only_2(token_ids: Tensor, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -INF).index_fill(0, torch.tensor([2]), 0.0)

    def and_9(token_ids: Tensor, logits: Tensor) -> Tensor:
        assert logits.isfinite().sum() == 1
        logits[9] = logits[2] + 1
        return logits

    assert chosen([only_2])[1] == Sample(2)
    assert chosen([only_2, and_9], bad_words=((9,),))[1] == Sample(9)


def test_what_a_processor_does_to_its_arguments_touches_nothing_else() -> None:
    def spoil(token_ids: Tensor, logits: Tensor) -> Tensor:
        token_ids.fill_(10**6)
        row = logits.clone()
        logits.fill_(float("nan"))
        return row

    assert chosen([spoil, spoil], repetition_penalty=1.5)[::2] == chosen([])[::2]
    own = ruled(LogitsRules(processors=(spoil,)), (4, 5))
    own.process(logits_of(1)[0])
    assert own.token_ids == [4, 5]


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        raise self.error


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


class Hostile(Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **more: Any) -> Any:
        raise ValueError("no question is answered")


class Nameless(Raises):
    def __getattr__(self, name: str) -> Any:
        raise ValueError("no question is answered")


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "error": (
        Raises(KeyError("no such state")),
        r"\(Raises\) raised KeyError: 'no such state' \(in __call__, .*:\d+",
    ),
    "exit": (Raises(SystemExit(3)), r"\(Raises\) raised SystemExit: 3"),
    "no text": (Raises(NoText()), r"raised .*NoText"),
    "signature": (lambda logits: logits, r"raised TypeError"),
    "None": (
        lambda ids, row: None,
        r"<lambda>\) returned a NoneType; expected a float32 tensor of shape \[12\]",
    ),
    "tensor of its own kind": (lambda ids, row: row.as_subclass(Hostile), r"returned a Hostile; expected"),
    "nameless": (Nameless(KeyError()), r"\(Nameless\) raised KeyError"),
    "built-in": (len, r"\(len\) raised TypeError"),
    "array": (lambda ids, row: row.numpy(), r"returned a ndarray; expected"),
    "shape": (lambda ids, row: row[:-1], r"returned a torch.float32 tensor of shape \[11\]"),
    "axis": (lambda ids, row: row[None], r"returned a torch.float32 tensor of shape \[1, 12\]"),
    "dtype": (lambda ids, row: row.double(), r"returned a torch.float64 tensor"),
    "sparse": (lambda ids, row: row.to_sparse(), r"returned a torch.float32 tensor .*sparse_coo"),
    "device": (lambda ids, row: row.to("meta"), r"returned a torch.float32 tensor .* on meta"),
    "nan": (lambda ids, row: row.index_fill(0, torch.tensor([0]), float("nan")), "returned a row with nan"),
    "inf": (lambda ids, row: row.index_fill(0, torch.tensor([0]), INF), "returned a row with inf"),
    "nothing": (lambda ids, row: torch.full_like(row, -INF), "returned -inf for every token"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_case_24_a_processors_fault_is_its_own_rows_alone_and_names_it(fault: str) -> None:
    processor, message = FAULTS[fault]

    def fine(token_ids: Tensor, logits: Tensor) -> Tensor:
        return logits

    first, failed, last = chosen([fine, processor, fine])
    assert [first, last] == chosen([])[::2]
    assert isinstance(failed, RequestFailed)
    with pytest.raises(RequestFailed, match=rf"logits_processors\[1\] .*{message}"):
        raise failed


def test_a_processors_error_keeps_its_cause_but_nothing_of_the_engine() -> None:
    class Big:
        pass

    error = ValueError("bad")
    big = Big()
    gone = weakref.ref(big)

    def step(held: Big) -> Sample | RequestFailed:
        return chosen([Raises(error)])[1]

    failed = step(big)
    assert isinstance(failed, RequestFailed) and failed.__cause__ is error
    del big
    gc.collect()
    assert gone() is None


def test_a_row_with_unsound_logits_of_the_model_never_meets_its_processors() -> None:
    calls: list[Tensor] = []
    own = ruled(LogitsRules(processors=(lambda ids, row: calls.append(row) or row,)))
    logits = logits_of(2)
    logits[1, 3] = float("nan")
    ops = select_ops("cpu", "float32")
    fine, failed = sample(ops, logits, [(make_sampling(), 0)] * 2, [(1, own)])
    assert isinstance(fine, Sample)
    assert "the model's logits are not finite" in str(failed)
    assert not calls


def test_rules_cross_to_the_tensor_side_pickled() -> None:
    rules = LogitsRules(1.1, 0.5, 0.25, ((3, 1.0),), ((1, 2),), (1, 2), (Raises,))
    assert pickle.loads(pickle.dumps(rules)) == rules
