from __future__ import annotations

import random

import pytest
from fakes import make_request

from motet.runtime.policy import POLICIES, order
from motet.runtime.request import Request, RequestStatus


def in_order(policy: str, requests: list[Request]) -> list[int]:
    shuffled = random.Random(0).sample(requests, len(requests))
    return [request.request_id for request in sorted(shuffled, key=lambda r: order(POLICIES[policy], r))]


def make_mixed() -> list[Request]:
    requests = [make_request(request_id=i, priority=p) for i, p in enumerate([0, 5, 0, -1, 5, 0])]
    for request in (requests[2], requests[4]):
        request.move_to(RequestStatus.WAITING)
        request.move_to(RequestStatus.RUNNING)
    return requests


def test_priority_serves_the_larger_first_then_who_runs_then_who_came_first() -> None:
    assert in_order("priority", make_mixed()) == [4, 1, 2, 0, 5, 3]


def test_fcfs_ignores_priority() -> None:
    assert in_order("fcfs", make_mixed()) == [2, 4, 0, 1, 3, 5]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_preempted_request_comes_before_equals_that_came_after_it(policy: str) -> None:
    preempted, later = make_request(request_id=3), make_request(request_id=4)
    for status in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED):
        preempted.move_to(status)
    later.move_to(RequestStatus.WAITING)
    assert in_order(policy, [later, preempted]) == [3, 4]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_two_requests_share_a_place(policy: str) -> None:
    requests = make_mixed()
    assert len({order(POLICIES[policy], request) for request in requests}) == len(requests)
