"""EngineLoop: what the engine thread does in each turn. Owns all mutable runtime state; one thread drives it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from os import PathLike

from motet.config import EngineConfig
from motet.errors import DeadlineExceeded, MotetError, RequestFailed
from motet.runtime.build import build_runtime
from motet.runtime.chat_template import Chat, Prompt
from motet.runtime.detokenizer import Detokenizer
from motet.runtime.meter import Meter
from motet.runtime.request import Delta, FinishReason, Request
from motet.runtime.statistics import EngineStats, StatisticsKeeper
from motet.runtime.tokenizer_thread import Encoded, TokenizerThread

Deliver = Callable[[Sequence[Delta]], None]
Command = Callable[["EngineLoop"], object]

PROMPT = "prompt"
"""The prerequisite of every request: its prompt as token ids."""

ADAPTER = "adapter"
"""The prerequisite of a request whose adapter is not on the device."""

QUOTA = "quota"
"""The prerequisite of a request that its tenant's quota delays."""


class EngineLoop:
    """One loaded engine.

    `deliver` takes what each step added to the streams; it must not block or raise. `post` brings a command
    back to this loop from the tokenizer's thread; it raises a MotetError if the loop takes none any more.
    `meter` is where it counts what it does.
    Loads the model at once: raises the model errors.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        config: EngineConfig,
        deliver: Deliver,
        post: Callable[[Command], None],
        meter: Meter,
    ) -> None:
        self._deliver = deliver
        self._meter = meter
        self._post = post
        this = weakref.proxy(self)  # no cycle: the weights go when the loop goes
        self.runtime = build_runtime(model, config, lambda request: this._release(request))
        self._core = self.runtime.core
        self._tokenizer = self.runtime.tokenizer
        self._texts = TokenizerThread(self._tokenizer, self.runtime.chat_template, self._post_prompt)
        self.runtime.adapter_loader.start(partial(_fail, post))
        self._keeper = StatisticsKeeper(self._core.scheduler, self.runtime.model_info.backend)
        meter.statistics = self._keeper.snapshot()

    @property
    def statistics(self) -> EngineStats:
        """A snapshot, replaced in each turn. May be read on any thread."""
        return self._meter.statistics

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    @property
    def is_empty(self) -> bool:
        return not self._core.scheduler.requests

    @property
    def next_deadline(self) -> float | None:
        """When `turn` must be called although nothing else happens, on `time.monotonic`'s scale."""
        times = self._core.scheduler.next_deadline, self.runtime.admission.next_release
        return min((when for when in times if when is not None), default=None)

    def turn(self) -> None:
        """Ends what is overdue, lets in what its quota allows, then runs one step if there is work.

        Raises what fails for all requests.
        """
        for group_id in self._core.scheduler.expired(time.monotonic()):
            error = DeadlineExceeded("the request's deadline passed before it was done")
            self.finish(group_id, FinishReason.TIMEOUT, error)
        for request in self.runtime.admission.release():
            self._core.scheduler.unblock(request, QUOTA)
        deltas = self._step() if self.has_work else []
        self._keeper.count(deltas)
        self._meter.statistics = self._keeper.snapshot()  # before anyone hears of the step
        self._tell(deltas)

    def add(self, request: Request, prompt: Prompt) -> None:
        """Takes a request in. Another thread tokenises what is not token ids; the request is blocked meanwhile."""
        self._keeper.enter(request)
        self._meter.enter(request)
        request.prerequisites.add(PROMPT)
        arrival = request.adapter.ready if request.adapter is not None else None
        if arrival is not None:
            request.prerequisites.add(ADAPTER)
        self._core.scheduler.add(request)
        if arrival is not None:
            arrival.add_done_callback(partial(_post_adapter, self._post, request))
        if isinstance(prompt, (str, Chat)) or request.params.bad_words:
            self._texts.submit(request, prompt)
        else:
            self._take_prompt(request, Encoded(prompt))

    def finish(self, group_id: int, reason: FinishReason, error: MotetError) -> bool:
        """Ends a request and its siblings in whatever state they are. False if all of them have ended."""
        deltas = self._core.scheduler.finish(group_id, reason, error)
        self._tell(deltas)
        return bool(deltas)

    def live_requests(self) -> list[Request]:
        return [request for request in self._core.scheduler.requests if not request.is_finished]

    def end(self, reason: FinishReason, error: Callable[[], MotetError]) -> None:
        """Ends every request, with an error of its own each. The loop is of no use afterwards."""
        try:
            deltas = self._core.abandon(reason, error)
            self._meter.statistics = self._keeper.snapshot()
            self._tell(deltas)
        finally:  # whatever state a fault has left the rest in
            self._texts.close()
            self.runtime.adapter_loader.close(error)

    def _step(self) -> list[Delta]:
        start = time.monotonic()
        deltas = self._core.step()
        plan = self._core.last_plan
        assert plan is not None
        seconds = time.monotonic() - start
        self.runtime.admission.begin(plan.new)
        self._core.scheduler.step_budget.observe(plan, seconds)
        self._meter.step(plan, seconds)
        return deltas

    def _tell(self, deltas: Sequence[Delta]) -> None:
        self._meter.count(deltas)
        self.runtime.admission.count(deltas)
        self._deliver(deltas)

    def _post_prompt(self, request: Request, encoded: Encoded | BaseException) -> None:
        """On the tokenizer's thread."""
        with suppress(MotetError):  # the engine ended meanwhile, and the request with it
            self._post(lambda loop: loop._take_prompt(request, encoded))

    def _take_prompt(self, request: Request, encoded: Encoded | BaseException) -> None:
        if request.is_finished:
            return
        try:
            if isinstance(encoded, BaseException):
                raise encoded
            prompt = encoded.prompt
            self.runtime.intake.check_prompt(prompt, request.params)
            if encoded.bad_words:
                request.sampling = self.runtime.intake.forbid(request.sampling, encoded.bad_words)
            request.set_prompt(prompt, Detokenizer(self._tokenizer, prompt, request.params))
            if not self.runtime.admission.pay(request):
                request.prerequisites.add(QUOTA)
        except MotetError as error:
            self.finish(request.request_id, FinishReason.ERROR, error)
        except BaseException as exc:  # whatever a tokenizer may raise concerns this request alone
            failure = RequestFailed(f"the tokenizer failed on this prompt: {exc}")
            failure.__cause__ = exc
            self.finish(request.request_id, FinishReason.ERROR, failure)
        else:
            self._core.scheduler.unblock(request, PROMPT)

    def _take_adapter(self, request: Request, error: BaseException | None) -> None:
        if request.is_finished:
            return
        if isinstance(error, MotetError):
            self.finish(request.request_id, FinishReason.ERROR, error)
        else:
            self.runtime.intake.set_root_hash(request)
            self._core.scheduler.unblock(request, ADAPTER)

    def _release(self, request: Request) -> None:
        """The one place where a request that was taken in gives its adapter back."""
        self._keeper.leave(request)
        if request.adapter is not None:
            self.runtime.adapters.release(request.adapter)


def _fail(post: Callable[[Command], None], fault: BaseException) -> None:
    """Any thread: what befell it concerns every request."""

    def command(loop: EngineLoop) -> None:
        raise fault

    with suppress(MotetError):  # the engine ended meanwhile
        post(command)


def _post_adapter(post: Callable[[Command], None], request: Request, arrival: Future[None]) -> None:
    """On the adapter loader's thread."""
    with suppress(MotetError):  # the engine ended meanwhile, and the request with it
        post(lambda loop: loop._take_adapter(request, arrival.exception()))
