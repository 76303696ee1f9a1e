"""EngineCore: one step of the engine, whatever the model and the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from motet.errors import MotetError
from motet.runtime.request import Delta, FinishReason
from motet.runtime.scheduler import Scheduler
from motet.runtime.scheduler_output import SchedulerOutput, StepResult


class StepHandle(Protocol):
    """A submitted plan."""

    def result(self) -> StepResult:
        """Waits until the device is done."""


class Runner(Protocol):
    """The tensor side, as far as the core knows it."""

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        """Starts a plan. Plans are computed in the order in which they come."""


class EngineCore:
    """Drives a scheduler and a runner, with up to `depth` plans in flight at once."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self.last_plan: SchedulerOutput | None = None
        """The one whose result was taken in last."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[Delta]:
        """Schedules and submits until `depth` plans are in flight, then takes in the oldest."""
        while len(self._in_flight) < self._depth and (plan := self.scheduler.schedule()) is not None:
            self._in_flight.append((plan, self._runner.submit(plan)))
        assert self._in_flight, "there is work, but no request can advance"
        plan, handle = self._in_flight.popleft()
        self.last_plan = plan
        return self.scheduler.update(plan, handle.result())

    def abandon(self, reason: FinishReason, error: Callable[[], MotetError]) -> list[Delta]:
        """Ends every request, with an error of its own each. Plans in flight are not waited for."""
        self._in_flight.clear()
        return self.scheduler.abandon(reason, error)
