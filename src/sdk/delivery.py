"""Delivery: from the engine thread to the streams, with one hop per step and event loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from motet.errors import InvalidRequest, MotetError
from motet.sdk.loops import Loop, LoopGone
from motet.sdk.outputs import Token, Usage
from motet.sdk.stream import StreamEnd, TokenStream

if TYPE_CHECKING:
    from motet.runtime.request import Delta, Request
    from motet.sdk.hooks import RequestReport


@dataclass(frozen=True, slots=True)
class _Address:
    """Where to find the stream of a live request."""

    name: str
    """The user's id of the request."""
    loop: Loop
    stream: weakref.ref[TokenStream]
    report: RequestReport | None
    """For the application's hooks; None if there are none."""
    ended: list[Request] = field(default_factory=list)
    """Those of its outputs that have ended."""


@dataclass(slots=True)
class _Parcel:
    """What one step brings to one stream."""

    stream: weakref.ref[TokenStream]
    tokens: list[Token] = field(default_factory=list)
    end: StreamEnd | None = None


class Delivery:
    """Knows which stream each live request belongs to, and holds none of them alive.

    Streams may be attached on any thread; `deliver` is for the engine thread only. `abort` is asked to end
    the requests whose event loop is gone.
    """

    def __init__(self, abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._addresses: dict[int, _Address] = {}
        self.ids: dict[str, int] = {}
        """The engine's own number of each live request, by the user's id."""

    def attach(self, request_id: int, loop: Loop, stream: TokenStream, report: RequestReport | None) -> None:
        """Raises InvalidRequest if the stream's own id is that of a live request."""
        name = stream.request_id
        if self.ids.setdefault(name, request_id) != request_id:
            raise InvalidRequest(
                f"request_id {name!r} is still live: choose another, or wait until that one ends"
            )
        self._addresses[request_id] = _Address(name, loop, weakref.ref(stream), report)

    def detach(self, request_id: int) -> None:
        """The request has ended: its name is free again."""
        address = self._addresses.pop(request_id, None)
        if address is not None:
            del self.ids[address.name]

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Sends each stream its part. Never blocks; what nobody waits for any more is dropped."""
        last = {delta.request.request_id: delta for delta in deltas}
        by_loop: dict[Loop, dict[int, _Parcel]] = {}
        ends: dict[int, tuple[StreamEnd, RequestReport | None]] = {}
        for delta in deltas:
            request = delta.request
            address = self._addresses.get(request.group_id)
            if address is None:
                continue
            parcels = by_loop.setdefault(address.loop, {})
            parcel = parcels.setdefault(request.group_id, _Parcel(address.stream))
            is_last = request.is_finished and delta is last[request.request_id]
            if delta.sample is not None:
                parcel.tokens.append(_token(delta, is_last))
            if is_last:
                address.ended.append(request)
                if len(address.ended) == request.params.n or request.sibling_ids:  # ended before it forked
                    parcel.end = _end(address.ended)
                    ends[request.group_id] = parcel.end, address.report
        # Behind all that a fault could be in: whoever is detached hears of its end.
        for group_id, (end, report) in ends.items():
            self.detach(group_id)
            if report is not None:
                report.finish(end)
        for loop, parcels in by_loop.items():
            try:
                loop.call_soon(_hand_over, list(parcels.values()))
            except LoopGone:
                for group_id in parcels:
                    self._abort(group_id)

    def close(self, refusal: Callable[[], MotetError]) -> None:
        """The engine has ended: ends the streams that it did not, because a fault came in between.

        Each gets an error of its own.
        """
        for request_id, address in list(self._addresses.items()):
            end = StreamEnd(_NOTHING_KNOWN, (), None, (), "error", refusal())
            self.detach(request_id)
            if address.report is not None:
                address.report.finish(end)
            with suppress(LoopGone):
                address.loop.call_soon(_hand_over, [_Parcel(address.stream, end=end)])


_NOTHING_KNOWN = Usage(0, 0, 0, 0, None, None, 0.0, ())


def _hand_over(parcels: list[_Parcel]) -> None:
    """On the streams' loop."""
    for parcel in parcels:
        stream = parcel.stream()
        if stream is not None:
            stream.receive(parcel.tokens, parcel.end)


def _token(delta: Delta, is_last: bool) -> Token:
    request, sample = delta.request, delta.sample
    assert sample is not None
    ended_well = is_last and request.error is None and request.finish_reason is not None
    return Token(
        text=delta.text,
        token_id=sample.token_id,
        index=request.index,
        logprob=sample.logprob,
        top_logprobs=sample.top_logprobs,
        finish_reason=request.finish_reason.value if ended_well and request.finish_reason else None,
        stop_reason=request.stop_reason if ended_well else None,
    )


def _end(outputs: list[Request]) -> StreamEnd:
    """The end of a stream, of all requests behind it."""
    outputs = sorted(outputs, key=lambda output: output.index)
    first = outputs[0]
    arrival, first_run = first.arrival_time, first.first_run_time
    first_token = min((o.first_token_time for o in outputs if o.first_token_time is not None), default=None)
    usage = Usage(
        prompt_tokens=first.num_prompt_tokens,
        cached_tokens=first.num_cached_tokens,
        output_tokens=sum(output.num_output_tokens for output in outputs),
        preemptions=sum(output.num_preemptions for output in outputs),
        queue_time=None if first_run is None else first_run - arrival,
        ttft=None if first_token is None else first_token - arrival,
        total_time=max(output.timeline[-1][1] for output in outputs) - arrival,
        timeline=tuple((state, when - arrival) for state, when in first.timeline),
    )
    failed = next((output for output in outputs if output.error is not None), None)
    reasons = tuple((_reason(output), output.stop_reason) for output in outputs)
    return StreamEnd(
        usage,
        prompt_token_ids=tuple(first.token_ids[: first.num_prompt_tokens]),
        prompt_logprobs=tuple(first.prompt_logprobs) or None,
        reasons=reasons,
        finish_reason=_reason(failed or first),
        error=None if failed is None else failed.error,
    )


def _reason(ended: Request) -> str:
    assert ended.finish_reason is not None
    return ended.finish_reason.value
