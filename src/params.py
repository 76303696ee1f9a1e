"""SamplingParams: how one request's tokens are chosen and when it ends. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _as_tuple(value: object) -> object:
    """A lone item or any sequence of items, as a tuple."""
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) else value


MAX_STOP_CHARACTERS = 10_000
"""Together in one request's stop strings: the search for them must not hold up others."""

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
NonEmptyStr = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]


class SamplingParams(BaseModel):
    """Frozen; an unknown key or a value out of range is an error (`pydantic.ValidationError`).

    None means the model's own `generation_config`; where that has no `do_sample: true`, decoding is greedy.
    The filters apply in this order: temperature, `top_k`, `top_p`, `min_p`; the likeliest token always stays.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

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

    stop: Annotated[tuple[NonEmptyStr, ...], BeforeValidator(_as_tuple)] = ()
    """Strings that end the request where the first of them is complete."""

    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_as_tuple)] = ()
    """Token ids that end the request, besides the model's own end tokens."""

    include_stop: bool = False
    """Whether the text holds what stopped it."""

    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""

    ignore_eos: bool = False
    """Go on past the model's end tokens (`stop_token_ids` still work)."""

    logprobs: int | None = Field(default=None, ge=0, le=1000)
    """Report the log-probability of each token and of this many likeliest ones. None: report none."""

    @model_validator(mode="after")
    def _check(self) -> SamplingParams:
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop: the strings may have {MAX_STOP_CHARACTERS} characters together, not more"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self
