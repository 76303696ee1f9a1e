"""Order of service: the one place that says who comes before whom.

A policy sorts requests into classes. A lower class number is served first and may take the place of a
higher one; inside a class running requests go on before waiting ones start, each in order of arrival, so
equals never take each other's place in turns.
"""

from __future__ import annotations

from collections.abc import Callable

from motet.runtime.request import Request, RequestStatus

Policy = Callable[[Request], int]
"""The class of a request; it may not change while the request lives."""

POLICIES: dict[str, Policy] = {
    "priority": lambda request: -request.priority,
    "fcfs": lambda request: 0,
}


def order(policy: Policy, request: Request) -> tuple[int, bool, int]:
    """Sorts requests into the order of service."""
    return policy(request), request.status is not RequestStatus.RUNNING, request.request_id
