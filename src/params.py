"""SamplingParams: how one request's tokens are chosen and when it ends. TenantPolicy: what a tenant may. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BeforeValidator, Field, InstanceOf, model_validator
from pydantic.json_schema import SkipJsonSchema

from motet.frozen import Frozen


def _as_tuple(value: object) -> object:
    """A lone item or any sequence of items, as a tuple."""
    if isinstance(value, (str, int, LogitsProcessor)):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


def _with_int_keys(value: object) -> object:
    """Token ids as JSON writes them, where all keys are strings, as ints."""
    if not isinstance(value, Mapping):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: v for key, v in value.items()}


MAX_STOP_CHARACTERS = 10_000
"""Together in one request's stop strings: the search for them must not hold up others."""

MAX_BAD_WORDS_CHARACTERS = 100_000
"""Together in one request's bad words, for the same reason."""

MAX_OUTPUTS = 1024
"""Of one request."""

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
NonEmptyStr = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_as_tuple)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


@runtime_checkable
class LogitsProcessor(Protocol):
    """A function, or an object with `__call__`, that changes one request's logits before a token is chosen.

    It runs on the engine's thread, once for each token of its request, and holds up every other request
    meanwhile: keep it short. A preemption does not run it again. If it raises, or returns anything but a row
    as described here, its request ends with `RequestFailed`, which names it; no other request is touched.
    """

    def __call__(self, token_ids: Any, logits: Any, /) -> Any:
        """The logits to choose from; the very tensor that was given, changed in place, may be returned.

        token_ids: `torch.Tensor` [n] int64, the prompt and the output so far. logits: `torch.Tensor` [V]
        float32 over the vocabulary, behind everything else that changes them (see `SamplingParams`); -inf is
        impossible. Both are copies. Returns [V] float32 on the same device, -inf allowed, NaN and +inf not,
        with at least one finite number.
        """


class SamplingParams(Frozen):
    """Frozen; an unknown key or a value out of range is an error (`pydantic.ValidationError`).

    None means the model's own `generation_config`; where that has no `do_sample: true`, decoding is greedy.
    What changes logits applies in this order: `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`, `logit_bias`; then what makes tokens impossible: `min_tokens`, `bad_words`,
    `allowed_token_ids`; then `logits_processors`, one after the other. Then the filters: temperature, `top_k`,
    `top_p`, `min_p`; the likeliest token always stays. Log-probabilities are the model's own, before all this.
    """

    max_tokens: int = Field(default=256, ge=0)
    """Most tokens to generate. 0 only processes the prompt (and so warms the prefix cache)."""

    min_tokens: int = Field(default=0, ge=0)
    """None of the first so many tokens is an end token, and no stop string ends the request in them."""

    temperature: float | None = Field(default=None, ge=0.0)
    """0 is greedy."""

    top_p: Probability | None = None
    """Keep the likeliest tokens that together reach this probability. 1 keeps all."""

    top_k: int | None = Field(default=None, ge=0)
    """Keep this many of the likeliest tokens. 0 keeps all."""

    min_p: Probability | None = None
    """Keep tokens at least this fraction as likely as the likeliest. 0 keeps all."""

    seed: int | None = Field(default=None, ge=0, lt=1 << 64)
    """The same seed and prompt give the same tokens, in any company. None: drawn from `EngineConfig.seed`."""

    n: int = Field(default=1, ge=1, le=MAX_OUTPUTS)
    """How many answers to give. They share the prompt's KV and draw different numbers from one seed, the first
    of them those of a request with n = 1. Greedy ones are all alike. An error in one fails the request."""

    stop: Annotated[tuple[NonEmptyStr, ...], BeforeValidator(_as_tuple)] = ()
    """Strings that end the request where the first of them is complete."""

    stop_token_ids: TokenIds = ()
    """Token ids that end the request, besides the model's own end tokens."""

    include_stop: bool = False
    """Whether the text holds what stopped it."""

    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""

    ignore_eos: bool = False
    """Go on past the model's end tokens (`stop_token_ids` still work)."""

    logprobs: int | None = Field(default=None, ge=0, le=1000)
    """Report the log-probability of each token and of this many likeliest ones. None: report none."""

    repetition_penalty: float | None = Field(default=None, gt=0.0)
    """Divides the positive logits, and multiplies the negative ones, of tokens that stand in the prompt or the
    output (arXiv 1909.05858). 1 is neutral, more discourages."""

    presence_penalty: Penalty | None = None
    """Taken off the logit of each token that stands in the output. Negative encourages. None: 0."""

    frequency_penalty: Penalty | None = None
    """Taken off a token's logit as often as it stands in the output. Negative encourages. None: 0."""

    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(_with_int_keys)] | None = None
    """Added to the logits of these token ids. To forbid tokens for certain, use `bad_words` or
    `allowed_token_ids`."""

    bad_words: Annotated[tuple[NonEmptyStr, ...], BeforeValidator(_as_tuple)] = ()
    """Words that are never completed, with or without a space before them. A word is the token ids that the
    tokenizer gives it alone: inside longer words, or spelt in other tokens, its letters may still appear."""

    allowed_token_ids: TokenIds | None = None
    """Only these may be chosen. None: all."""

    logits_processors: SkipJsonSchema[
        Annotated[tuple[InstanceOf[LogitsProcessor], ...], BeforeValidator(_as_tuple)]
    ] = ()
    """The application's own changes, one after the other, with the last word. See `LogitsProcessor`."""

    prompt_logprobs: int | None = Field(default=None, ge=0, le=1000)
    """Report the log-probability of each prompt token but the first, and of this many likeliest ones at its
    place. The whole prompt is computed for it, so that `Usage.cached_tokens` is 0. None: report none."""

    @model_validator(mode="after")
    def _check(self) -> SamplingParams:
        for name, most in (("stop", MAX_STOP_CHARACTERS), ("bad_words", MAX_BAD_WORDS_CHARACTERS)):
            if sum(map(len, getattr(self, name))) > most:
                raise ValueError(f"{name}: the strings may have {most} characters together, not more")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self


class TenantPolicy(Frozen):
    """What one tenant may do. Frozen; an unknown key or a value out of range is an error.

    `weight` and `max_running` are checked and kept, but nothing is scheduled by them yet. What is refused costs
    nothing: no part of a quota, no place.
    """

    weight: float = Field(default=1.0, gt=0.0)
    """Its share of the engine beside other tenants'. Not at work yet."""

    max_running: int | None = Field(default=None, ge=1)
    """Most of its requests that run in one step. None: no limit. Not at work yet."""

    max_waiting: int | None = Field(default=None, ge=0)
    """Most of its requests that wait, be it for a place among those that run (`EngineConfig.max_num_seqs`, less what
    other tenants take) or for its own quota; one more is `QueueFull`, or `QuotaExceeded` if the quota is why it would
    wait. 0: what cannot run at once is refused. Each of a request's n outputs counts, but the last that is let in may
    have any number. None: no limit."""

    max_waiting_tokens: int | None = Field(default=None, ge=1)
    """Most prompt tokens of its requests that have not begun to run, as `EngineConfig.max_waiting_tokens`."""

    tokens_per_second: float | None = Field(default=None, gt=0.0)
    """Prompt and output tokens that it may use, over time, cached ones included. A request begins when the quota has
    tokens for its prompt, or is full; until then it is delayed and holds up no other tenant's. Output tokens of all
    its n outputs are charged as they are made, and may run into debt, for which the tenant's next requests wait. A
    delayed request may be aborted and has its deadline like any other. A change holds for what waits, too. None: no
    limit."""

    burst: int | None = Field(default=None, ge=1)
    """Tokens that it may save up under `tokens_per_second`. None: those of one second."""

    max_priority: int | None = None
    """Largest `priority` that its requests may have; a larger one is InvalidRequest. None: no limit."""

    adapters: Annotated[tuple[NonEmptyStr, ...] | None, BeforeValidator(_as_tuple)] = None
    """Names of adapters that it may use, or globs (`acme-*`); another one is AdapterNotAllowed. None: all of them.
    The base model alone is always allowed."""

    prefix_group: NonEmptyStr | None = None
    """Tenants of one group share the KV of equal prompt beginnings, and so can tell by its speed what others of the
    group have asked. None: shares only with itself."""

    @model_validator(mode="after")
    def _check(self) -> TenantPolicy:
        if self.burst is not None and self.tokens_per_second is None:
            raise ValueError("burst has no meaning without tokens_per_second")
        return self
