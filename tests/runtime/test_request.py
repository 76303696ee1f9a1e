from __future__ import annotations

import pytest
from fakes import END, FakeClock, FakeDetokenizer, make_request

from motet.runtime.request import FinishReason, InvalidTransition, Request, RequestStatus
from motet.runtime.scheduler_output import Sample

BLOCKED, WAITING, RUNNING = RequestStatus.BLOCKED, RequestStatus.WAITING, RequestStatus.RUNNING
PREEMPTED, FINISHED = RequestStatus.PREEMPTED, RequestStatus.FINISHED

WAY_TO: dict[RequestStatus, list[RequestStatus]] = {
    BLOCKED: [],
    WAITING: [WAITING],
    RUNNING: [WAITING, RUNNING],
    PREEMPTED: [WAITING, RUNNING, PREEMPTED],
    FINISHED: [FINISHED],
}
VALID = {
    (BLOCKED, WAITING),
    (WAITING, RUNNING),
    (RUNNING, PREEMPTED),
    (PREEMPTED, RUNNING),
    (BLOCKED, FINISHED),
    (WAITING, FINISHED),
    (RUNNING, FINISHED),
    (PREEMPTED, FINISHED),
}


def make_in(status: RequestStatus) -> Request:
    request = make_request(request_id=7)
    for step in WAY_TO[status]:
        request.move_to(step)
    return request


@pytest.mark.parametrize("before", list(RequestStatus))
@pytest.mark.parametrize("after", list(RequestStatus))
def test_only_valid_transitions_are_made(before: RequestStatus, after: RequestStatus) -> None:
    request = make_in(before)
    states = len(request.timeline)
    if (before, after) in VALID:
        request.move_to(after)
        assert request.status is after
        assert request.timeline[states:] == [(after.value, 0.0)]
    else:
        with pytest.raises(InvalidTransition, match=f"request 7: {before.value} -> {after.value}"):
            request.move_to(after)
        assert request.status is before
        assert len(request.timeline) == states


def test_the_timeline_tells_when_each_state_was_entered() -> None:
    clock = FakeClock(1.0)
    request = make_request(clock=clock)
    for now, status in ((2.0, WAITING), (3.5, RUNNING), (4.0, PREEMPTED), (5.0, RUNNING), (6.0, FINISHED)):
        clock.now = now
        request.move_to(status)
    assert request.timeline == [
        ("blocked", 1.0),
        ("waiting", 2.0),
        ("running", 3.5),
        ("preempted", 4.0),
        ("running", 5.0),
        ("finished", 6.0),
    ]


def accept(request: Request, *token_ids: int) -> list[tuple[str, FinishReason | None]]:
    deltas = []
    for token_id in token_ids:
        delta = request.accept(Sample(token_id))
        assert delta.sample == Sample(token_id)
        assert delta.request is request
        deltas.append((delta.text, request.finish_reason))
    return deltas


def test_it_ends_by_length_with_the_last_token_it_may_have() -> None:
    request = make_request((1, 2), max_tokens=2)
    assert accept(request, 5, 6) == [("", None), ("", FinishReason.LENGTH)]
    assert (request.token_ids, request.num_output_tokens, request.stop_reason) == ([1, 2, 5, 6], 2, None)


def test_case_21_an_answer_that_does_not_fit_ends_by_length_at_the_limit() -> None:
    request = make_request((1, 2, 3), max_tokens=100, max_total_tokens=5)
    assert request.max_output_tokens == 2
    assert accept(request, 5, 6) == [("", None), ("", FinishReason.LENGTH)]


def test_an_end_token_stops_it_and_is_named() -> None:
    request = make_request(end_token_ids=(END, 9))
    assert accept(request, 5, 9) == [("", None), ("", FinishReason.STOP)]
    assert request.stop_reason == 9


def test_an_end_token_as_the_last_token_it_may_have_is_a_stop() -> None:
    request = make_request(end_token_ids=(END,), max_tokens=1)
    assert accept(request, END) == [("", FinishReason.STOP)]


def test_an_end_token_among_the_first_min_tokens_does_not_stop_it() -> None:
    request = make_request(end_token_ids=(END,), min_tokens=2)
    assert accept(request, END, END, END) == [("", None), ("", None), ("", FinishReason.STOP)]


def test_a_stop_string_is_the_reason_even_where_the_token_would_have_been_one() -> None:
    request = make_request(max_tokens=2, detokenizer=FakeDetokenizer(stop_at=4))
    assert accept(request, 1, 4) == [("b", None), ("", FinishReason.STOP)]
    assert request.stop_reason == "e"


def test_what_the_detokenizer_held_back_comes_with_the_last_token() -> None:
    request = make_request(max_tokens=3, detokenizer=FakeDetokenizer(hold_back=2))
    assert accept(request, 2, 1, 2) == [("", None), ("cb", None), ("c", FinishReason.LENGTH)]
    request = make_request(end_token_ids=(END,), detokenizer=FakeDetokenizer(hold_back=2))
    assert accept(request, 2, END) == [("", None), ("c", FinishReason.STOP)]


def test_the_first_token_is_timed_and_no_later_one() -> None:
    clock = FakeClock(3.0)
    request = make_request(clock=clock)
    assert request.first_token_time is None
    accept(request, 1)
    clock.now = 4.0
    accept(request, 1)
    assert request.first_token_time == 3.0


@pytest.mark.parametrize(("max_tokens", "needed"), [(0, 3), (1, 3), (2, 4), (5, 7)])
def test_the_last_output_token_is_never_computed(max_tokens: int, needed: int) -> None:
    request = make_request((1, 2, 3), max_tokens=max_tokens)
    request.token_ids += [4] * max_tokens
    assert request.num_uncomputed_tokens == needed
    request.num_computed_tokens = needed
    assert request.num_uncomputed_tokens == 0


def test_a_token_that_is_awaited_can_be_planned_with() -> None:
    request = make_request((1, 2, 3))
    request.num_computed_tokens = 3
    assert request.num_uncomputed_tokens == 0
    request.num_awaited_tokens = 1
    assert request.num_uncomputed_tokens == 1
