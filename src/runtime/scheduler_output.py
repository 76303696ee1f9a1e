"""What crosses between bookkeeping and tensors: a plan one way, its result the other.

Both are frozen, picklable and self-contained: the tensor side never sees a `Request`, and never needs to
ask back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from motet.errors import RequestFailed
from motet.params import LogitsProcessor

IN_FLIGHT = -1
"""In `Chunk.token_ids`: the token that the plan before this one samples for the same request."""


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """What changes a request's logits before a token is chosen, in the order in which it applies.

    Each default is neutral. See `SamplingParams` for the meanings.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids, at least one each: the last of them is impossible behind the others."""
    allowed_token_ids: tuple[int, ...] | None = None
    processors: tuple[LogitsProcessor, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """`SamplingParams` with every default filled in: all that choosing a token needs."""

    temperature: float
    """0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: int | None
    min_tokens: int
    end_token_ids: frozenset[int]
    """End and stop tokens: impossible as one of the first `min_tokens` tokens."""
    rules: LogitsRules | None = None
    """None: all neutral, and nothing is spent on them."""
    choice: int = 0
    """Which of the request's n outputs it is: each draws numbers of its own from one seed."""
    prompt_logprobs: int | None = None
    """As in `SamplingParams`; only the first of n outputs reports them."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the tensor side keeps of a request, from its first chunk until a plan drops it."""

    request_id: int
    adapter_slot: int
    """Where its adapter's weights are; -1: the base model alone."""
    sampling: SamplingSpec
    token_ids: tuple[int, ...] = ()
    """Its prompt and the output so far; empty without `SamplingSpec.rules`, which alone look at them."""
    num_prompt_tokens: int = 0
    """So many of `token_ids` are the prompt."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one request that one step computes: a piece of a prompt, or one output token."""

    request_id: int
    start: int
    """Position of the first of them: so many tokens of the request have their KV already."""
    token_ids: tuple[int, ...]
    new_block_ids: tuple[tuple[int, ...], ...]
    """What to append to the request's block tables, one per KV group of the model."""
    output_index: int
    """Which output token to sample behind the last of them; -1: none."""
    next_prompt_ids: tuple[int, ...] = ()
    """The prompt tokens that follow its tokens one by one, from the first, if their log-probabilities are wanted."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan."""

    dropped: tuple[int, ...]
    """Requests to forget, before anything else: they ended or were preempted."""
    new: tuple[NewRequest, ...]
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """KV blocks to copy before the step, (source, destination). No destination is a source."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated token."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one plan brought, by request id."""

    samples: dict[int, tuple[Sample, ...]]
    faults: dict[int, RequestFailed] = field(default_factory=dict)
    """Requests that could not get a token, each with its error; the others are not touched."""
    prompt_logprobs: dict[int, tuple[dict[int, float], ...]] = field(default_factory=dict)
    """For each chunk with `next_prompt_ids`: of those tokens and of the likeliest at their places, by token id."""
