"""What crosses between bookkeeping and tensors: a plan one way, its result the other.

Both are frozen, picklable and self-contained: the tensor side never sees a `Request`, and never needs to
ask back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

IN_FLIGHT = -1
"""In `Chunk.token_ids`: the token that the plan before this one samples for the same request."""


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


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the tensor side keeps of a request, from its first chunk until a plan drops it."""

    request_id: int
    adapter_slot: int
    """Where its adapter's weights are; -1: the base model alone."""
    sampling: SamplingSpec


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


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan."""

    dropped: tuple[int, ...]
    """Requests to forget, before anything else: they ended or were preempted."""
    new: tuple[NewRequest, ...]
    chunks: tuple[Chunk, ...]


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
    faults: dict[int, str] = field(default_factory=dict)
    """Requests that could not get a token, and why; the others are not touched."""
