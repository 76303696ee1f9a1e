"""Intake: what a user asked for, checked against the model and with every default filled in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from motet.errors import InvalidRequest, PromptTooLong
from motet.params import SamplingParams
from motet.runtime.block_hash import root_hash
from motet.runtime.request import Clock, Request
from motet.runtime.scheduler_output import LogitsRules, SamplingSpec
from motet.runtime.tenants import Tenants

if TYPE_CHECKING:
    from motet.lora.generation import AdapterLease
    from motet.runtime.models.generation_defaults import GenerationDefaults
    from motet.runtime.places import Place


@dataclass(frozen=True)
class Intake:
    """What requests are checked and completed with. Any thread may use it.

    Immutable but for its counter and the tenants' policies.
    """

    vocab_size: int
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    kv_capacity: int
    """Tokens that the whole KV cache holds."""
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    model_digest: bytes
    kv_format: tuple[str, str]
    """dtype and layout of the KV cache."""
    seed: int
    tenants: Tenants = field(default_factory=Tenants)
    clock: Clock = time.monotonic
    _request_ids: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def max_total_tokens(self) -> int:
        return min(self.max_model_len, self.kv_capacity)

    def make_request(
        self,
        params: SamplingParams,
        *,
        tenant: str,
        adapter: AdapterLease | None,
        priority: int,
        deadline: float | None,
        place: Place | None = None,
    ) -> Request:
        """A blocked request without its prompt. `deadline` is in seconds from now.

        Raises InvalidRequest if the parameters do not fit the model.
        """
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise InvalidRequest(
                    f"{name} is {getattr(params, name)}, but the vocabulary has {self.vocab_size} tokens"
                )
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        self.check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self.check_ids(tuple(params.logit_bias or ()), "logit_bias")
        request_id = next(self._request_ids)
        sampling = self._resolve(params, request_id)
        if params.min_tokens and len(sampling.end_token_ids) == self.vocab_size:
            raise InvalidRequest(
                "min_tokens asks for a token that ends nothing, but every token is an end token"
            )
        self._check_possible(sampling)
        request = Request(
            request_id=request_id,
            params=params,
            sampling=sampling,
            max_total_tokens=self.max_total_tokens,
            clock=self.clock,
            tenant=tenant,
            sharing_scope=self.tenants.sharing_scope(tenant),
            adapter=adapter,
            place=place,
            sibling_ids=tuple(next(self._request_ids) for _ in range(1, params.n)),
            priority=priority,
            deadline=float("inf") if deadline is None else self.clock() + deadline,
        )
        self.set_root_hash(request)
        return request

    def set_root_hash(self, request: Request) -> None:
        """Says what the request may share KV with, as soon as its adapter's content is known."""
        lease = request.adapter
        ref = lease.ref if lease is not None else None
        if lease is None or ref is not None:
            request.root_hash = root_hash(
                self.model_digest,
                *self.kv_format,
                ref.digest if ref is not None else None,
                request.sharing_scope,
            )

    def forbid(self, sampling: SamplingSpec, bad_words: tuple[tuple[int, ...], ...]) -> SamplingSpec:
        """The same with its bad words as token ids. Raises InvalidRequest if they do not fit the model."""
        for word in bad_words:
            self.check_ids(word, "bad_words")
        sampling = replace(sampling, rules=replace(sampling.rules or LogitsRules(), bad_words=bad_words))
        self._check_possible(sampling)
        return sampling

    def check_prompt(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises InvalidRequest or PromptTooLong if the prompt cannot be served."""
        self.check_length(len(token_ids), params)
        self.check_ids(token_ids, "the prompt")

    def check_length(self, num_tokens: int, params: SamplingParams) -> None:
        """Raises InvalidRequest or PromptTooLong if a prompt of that length cannot be served."""
        if num_tokens == 0:
            raise InvalidRequest(
                "the prompt is empty (and the model puts no token before it): give at least one token"
            )
        room_for_answer = min(params.max_tokens, 1)
        if num_tokens + room_for_answer > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, but prompt and answer together may have "
                f"{self.max_model_len} (EngineConfig.max_model_len, or the model's context): shorten the prompt"
            )
        if num_tokens + room_for_answer > self.kv_capacity:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, but the whole KV cache holds {self.kv_capacity}: "
                "shorten the prompt or raise EngineConfig.kv_cache_bytes"
            )

    def check_ids(self, token_ids: Sequence[int], what: str) -> None:
        """Raises InvalidRequest unless all ids are in the vocabulary."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise InvalidRequest(
                f"{what}: token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1})"
            )

    def _resolve(self, params: SamplingParams, request_id: int) -> SamplingSpec:
        defaults = self.defaults
        temperature = params.temperature
        if temperature is None:
            temperature = (
                (1.0 if defaults.temperature is None else defaults.temperature) if defaults.do_sample else 0.0
            )
        top_k = params.top_k if params.top_k is not None else defaults.top_k
        top_p = params.top_p if params.top_p is not None else defaults.top_p
        min_p = params.min_p if params.min_p is not None else defaults.min_p
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= frozenset(self.eos_token_ids)
        return SamplingSpec(
            temperature=temperature,
            top_k=min(top_k or 0, self.vocab_size),
            top_p=1.0 if top_p is None else top_p,
            min_p=min_p or 0.0,
            seed=params.seed if params.seed is not None else self._seed_of(request_id),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            min_tokens=params.min_tokens,
            end_token_ids=end_token_ids,
            rules=self._rules(params),
        )

    def _rules(self, params: SamplingParams) -> LogitsRules | None:
        """All but the bad words, whose token ids are not known yet."""
        repetition_penalty = params.repetition_penalty or self.defaults.repetition_penalty
        rules = LogitsRules(
            repetition_penalty=repetition_penalty or 1.0,
            frequency_penalty=params.frequency_penalty or 0.0,
            presence_penalty=params.presence_penalty or 0.0,
            logit_bias=tuple((params.logit_bias or {}).items()),
            allowed_token_ids=params.allowed_token_ids,
            processors=params.logits_processors,
        )
        return None if rules == LogitsRules() else rules

    def _check_possible(self, sampling: SamplingSpec) -> None:
        """Raises InvalidRequest if the bans leave no token for the beginning."""
        rules = sampling.rules
        if rules is None:
            return
        banned = {word[0] for word in rules.bad_words if len(word) == 1}
        if sampling.min_tokens:
            banned |= sampling.end_token_ids
        allowed = range(self.vocab_size) if rules.allowed_token_ids is None else rules.allowed_token_ids
        if banned.issuperset(allowed):
            raise InvalidRequest(
                "no token is left to choose: allowed_token_ids without the bad_words, and without the end tokens "
                "while min_tokens are to come, is empty; allow more or forbid less"
            )

    def _seed_of(self, request_id: int) -> int:
        digest = blake2b(f"{self.seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
