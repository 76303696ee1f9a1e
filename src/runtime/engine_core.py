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

    @property
    def runs(self) -> bool:
        """Whether the device computes it by itself; else `result` does."""

    def wait(self) -> None:
        """Until the device is at it no more."""

    def result(self) -> StepResult:
        """Waits until the plan is computed. Called once, in the order of the plans."""


class Runner(Protocol):
    """The tensor side, as far as the core knows it."""

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        """Takes a plan, which is computed behind those before it."""


class EngineCore:
    """Drives a scheduler and a runner, with up to `depth` plans in flight at once.

    The next plan is made while the one before it runs, so that the device need not wait for it; it then cannot know
    what comes meanwhile. Behind a plan that does not run by itself there is nothing to gain: none is made.
    """

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
        while self._may_plan and (plan := self.scheduler.schedule()) is not None:
            self._in_flight.append((plan, self._runner.submit(plan)))
        assert self._in_flight, "there is work, but no request can advance"
        plan, handle = self._in_flight.popleft()
        self.last_plan = plan
        return self.scheduler.update(plan, handle.result())

    @property
    def _may_plan(self) -> bool:
        if not self._in_flight:
            return True
        return len(self._in_flight) < self._depth and self._in_flight[-1][1].runs

    def abandon(self, reason: FinishReason, error: Callable[[], MotetError]) -> list[Delta]:
        """Ends every request, with an error of its own each. Nobody asks what the plans in flight brought."""
        for _, handle in self._in_flight:
            handle.wait()  # the memory that they use may go now
        self._in_flight.clear()
        return self.scheduler.abandon(reason, error)
