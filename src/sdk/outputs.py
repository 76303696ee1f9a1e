"""What an engine hands to its users. All of it frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. There is exactly one for each generated id, the last one included."""

    text: str
    """What it adds to the text. Empty while the bytes of a character, or what may become a stop string, are
    held back; a later token's text then brings them. All texts joined are exactly the decoded output."""
    token_id: int
    index: int = 0
    """Which of the request's n outputs it belongs to."""
    logprob: float | None = None
    """Of the model's own distribution, before temperature; None unless `SamplingParams.logprobs` is given."""
    top_logprobs: Mapping[int, float] | None = None
    """Of the likeliest tokens and of this one, by token id."""
    finish_reason: str | None = None
    """On the last token of its output: "stop" or "length"."""
    stop_reason: str | int | None = None
    """With "stop": the stop string or the end token's id."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took. Times in seconds."""

    prompt_tokens: int
    """Of the prompt, whatever n is."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    output_tokens: int
    """Of all outputs."""
    preemptions: int
    """Of all outputs."""
    queue_time: float | None
    """From the call until it first ran; None if it never did."""
    ttft: float | None
    """From the call until its first token; None if it has none."""
    total_time: float
    timeline: tuple[tuple[str, float], ...]
    """(state, seconds since the call when it was entered), of the first output."""

    def __str__(self) -> str:
        queued = "never ran" if self.queue_time is None else f"queued {self.queue_time:.3f} s"
        first = "no token" if self.ttft is None else f"first token after {self.ttft:.3f} s"
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.output_tokens} output tokens, "
            f"{self.preemptions} preemptions; {queued}, {first}, {self.total_time:.3f} s in all"
        )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] | None
    """Each token's `top_logprobs`; None unless asked for."""
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A request's whole result."""

    outputs: tuple[CompletionOutput, ...]
    """One for each of the n that were asked for; `text`, `token_ids` and `finish_reason` are those of the first."""
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None = None
    """For each prompt token the log-probabilities of the likeliest tokens at its place and its own, by token id,
    of the model's own distribution; None for the first. None altogether unless asked for."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason
