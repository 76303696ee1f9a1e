"""Request: one unit of work, its state machine, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from motet.errors import MotetError
from motet.params import SamplingParams
from motet.runtime.scheduler_output import Sample, SamplingSpec

if TYPE_CHECKING:
    from motet.lora.adapter import AdapterRef
    from motet.lora.generation import AdapterLease
    from motet.runtime.detokenizer import Detokenizer
    from motet.runtime.places import Place

Clock = Callable[[], float]


class RequestStatus(str, Enum):
    BLOCKED = "blocked"
    """Waits for something named in `prerequisites`, and holds up nobody."""
    WAITING = "waiting"
    """Has all it needs but its turn."""
    RUNNING = "running"
    """Holds KV blocks and takes part in steps."""
    PREEMPTED = "preempted"
    """Gave its KV blocks to another and waits to compute them again."""
    FINISHED = "finished"


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


_NEXT: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.BLOCKED: frozenset({RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class InvalidTransition(RuntimeError):
    """A request was moved between states that do not follow each other: a fault of ours, never the user's."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step, or an end, adds to a request's stream."""

    request: Request
    sample: Sample | None
    """The generated token; None where a request ends without one."""
    text: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """One request. Belongs to the engine thread once it is added to the scheduler."""

    request_id: int
    """Unique in the engine's life, in the order of arrival. The user's own id is a label, kept by the SDK."""
    params: SamplingParams
    sampling: SamplingSpec
    max_total_tokens: int
    """Prompt and output together may not pass this (the context length, the size of the KV cache)."""
    clock: Clock
    priority: int = 0
    deadline: float = float("inf")
    """When to end it, on `clock`'s scale."""
    tenant: str = "default"
    adapter: AdapterLease | None = None
    """Its hold on its adapter; None: the base model alone."""
    place: Place | None = None
    """Where `Admission` counts it and its siblings; None: nowhere."""
    group_id: int = -1
    """The `request_id` of its group's first, by which the SDK knows them all. Given none, it is its own."""
    index: int = 0
    """Which of the n outputs it is."""
    sibling_ids: tuple[int, ...] = ()
    """The ids of the siblings that it has yet to fork: while there are any, its last prompt token waits."""
    sharing_scope: str = ""
    """Who may share KV with it, by its tenant's policy when it began."""
    root_hash: bytes = b""
    """The parent of its first KV block's hash: everything that decides its KV besides its tokens."""
    prerequisites: set[str] = field(default_factory=set)
    """What it must have before it can wait for its turn."""

    token_ids: list[int] = field(default_factory=list)
    """Prompt and output."""
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    """Tokens whose KV is present, those in the plans in flight included."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when it was first admitted."""
    num_in_flight: int = 0
    """Plans that name it and whose results are still out."""
    num_awaited_tokens: int = 0
    """Output tokens that plans in flight will bring."""
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    """Those that are known yet, if they are wanted; None for the first token."""
    detokenizer: Detokenizer | None = None

    status: RequestStatus = RequestStatus.BLOCKED
    timeline: list[tuple[str, float]] = field(default_factory=list)
    """(state, when it was entered on `clock`'s scale), from when the user asked."""
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it."""
    error: MotetError | None = None

    def __post_init__(self) -> None:
        if self.group_id < 0:
            self.group_id = self.request_id
        if not self.timeline:
            self.timeline.append((self.status.value, self.clock()))

    @property
    def arrival_time(self) -> float:
        return self.timeline[0][1]

    @property
    def first_run_time(self) -> float | None:
        """When it was first admitted; None if it never was."""
        return next((when for state, when in self.timeline if state == RequestStatus.RUNNING.value), None)

    @property
    def adapter_slot(self) -> int:
        """-1: the base model alone, or its adapter is not there yet."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def adapter_name(self) -> str:
        """Empty: the base model alone."""
        return "" if self.adapter is None else self.adapter.name

    def uses(self, ref: AdapterRef) -> bool:
        """Whether it holds that load of an adapter, or an earlier one of the same name that was replaced."""
        held = self.adapter.ref if self.adapter is not None else None
        return held is not None and held.name == ref.name and held.generation <= ref.generation

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next plan could compute: known or awaited, less those computed or in flight."""
        last_needed = self.num_prompt_tokens - 1
        if not self.sibling_ids:
            last_needed += max(self.max_output_tokens, 1)
        return min(self.num_tokens + self.num_awaited_tokens, last_needed) - self.num_computed_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens need no computing if their KV is there: those whose logits nobody wants."""
        if len(self.prompt_logprobs) < self.num_prompt_tokens and self.sampling.prompt_logprobs is not None:
            return len(self.prompt_logprobs) - 1
        return self.num_tokens - 1

    @property
    def max_output_tokens(self) -> int:
        return min(self.params.max_tokens, self.max_total_tokens - self.num_prompt_tokens)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Raises InvalidTransition unless `status` may follow the current one."""
        if status not in _NEXT[self.status]:
            raise InvalidTransition(f"request {self.request_id}: {self.status.value} -> {status.value}")
        self.status = status
        self.timeline.append((status.value, self.clock()))

    def fork(self) -> list[Request]:
        """Its siblings, one for each of its `sibling_ids`: the same prompt, and nothing of its own life."""
        siblings = [
            replace(
                self,
                request_id=request_id,
                index=index,
                sibling_ids=(),
                sampling=replace(self.sampling, choice=index, prompt_logprobs=None),
                prerequisites=set(),
                token_ids=list(self.token_ids),
                num_computed_tokens=0,
                num_cached_tokens=0,
                num_in_flight=0,
                num_preemptions=0,
                block_hashes=list(self.block_hashes),
                prompt_logprobs=[],
                detokenizer=self.detokenizer and self.detokenizer.fork(),
                status=RequestStatus.BLOCKED,
                timeline=self.timeline[:1],
            )
            for index, request_id in enumerate(self.sibling_ids, 1)
        ]
        self.sibling_ids = ()
        return siblings

    def set_prompt(self, token_ids: list[int], detokenizer: Detokenizer | None) -> None:
        """Gives a request its prompt, before it first leaves `blocked`."""
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.detokenizer = detokenizer
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def accept(self, sample: Sample) -> Delta:
        """Takes the next generated token: appends it, decodes it, and notes whether it is the last.

        The caller sees by `finish_reason` that the request must end. A failing detokenizer raises.
        """
        self.token_ids.append(sample.token_id)
        if self.first_token_time is None:
            self.first_token_time = self.clock()
        ends = (
            sample.token_id in self.sampling.end_token_ids and self.num_output_tokens > self.params.min_tokens
        )
        is_last = ends or self.num_output_tokens >= self.max_output_tokens
        text, stop_string = "", None
        if self.detokenizer is not None:
            text, stop_string = self.detokenizer.push(sample.token_id, is_stop_token=ends, last=is_last)
        if stop_string is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop_string
        elif ends:
            self.finish_reason, self.stop_reason = FinishReason.STOP, sample.token_id
        elif is_last:
            self.finish_reason = FinishReason.LENGTH
        return Delta(self, sample, text)
