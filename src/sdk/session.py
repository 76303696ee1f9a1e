"""Session: one life of an engine, and how a request begins in it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from motet.config import EngineConfig
from motet.errors import EngineClosed, MotetError
from motet.params import SamplingParams
from motet.runtime.chat_template import Chat, Prompt
from motet.sdk.arguments import as_ids, check_arguments, check_prompt_type
from motet.sdk.delivery import Delivery
from motet.sdk.hooks import HookThread
from motet.sdk.loops import current_loop
from motet.sdk.stream import TokenStream

if TYPE_CHECKING:  # torch is behind these, or they are not needed before an engine starts
    from motet.lora.generation import AdapterLease
    from motet.runtime.engine_loop import EngineLoop
    from motet.runtime.engine_thread import EngineThread
    from motet.runtime.request import Request
    from motet.sdk.hooks import Listeners, RequestReport
    from motet.sdk.life import Life
    from motet.sdk.metrics import EngineCollector


class Session:
    """One life of an engine, from start to close: its thread, and the streams of its live requests."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig,
        collector: EngineCollector,
        listeners: Listeners | None,
    ) -> None:
        """Raises InvalidRequest if another engine of its name lives on the same metrics registry."""
        from motet.runtime.engine_thread import EngineThread

        self._process = os.getpid()
        self.num_starters = 0
        """Calls of `start` that wait for it or have got it."""
        self.finalizer: weakref.finalize[..., Life]
        self.delivery = Delivery(self._cancel)
        self.thread: EngineThread = EngineThread(model, config, self.delivery.deliver)
        self.thread.ended.add_done_callback(lambda _: self.delivery.close(self._refusal))
        self._collector = collector
        name = collector.add(config.name, self.thread)
        self.hooks = HookThread(name, listeners) if listeners is not None else None

    def start(self) -> None:
        hooks = self.hooks
        if hooks is not None:
            hooks.start()
            self.thread.ended.add_done_callback(lambda _: hooks.close())
        self.thread.start()

    def stop(self) -> None:
        """Ends it at once, without waiting, and takes its metrics away."""
        self.thread.stop()
        self.withdraw()

    def withdraw(self) -> None:
        """Takes its metrics away and frees its name."""
        self._collector.remove(self.thread)

    @property
    def is_here(self) -> bool:
        """Whether its thread is in this process, and not in one that this was forked from."""
        return self._process == os.getpid()

    @property
    def is_serving(self) -> bool:
        thread = self.thread
        return self.is_here and thread.loop is not None and thread.refusal is None and not thread.is_stopping

    @property
    def serving(self) -> EngineLoop:
        """What the thread drives. Raises EngineClosed or EngineDead if it does not serve."""
        loop = self.thread.loop
        refusal = self.thread.refusal
        if refusal is not None:
            raise refusal
        if loop is None:
            raise EngineClosed("the engine is still loading its model: wait for `start()`")
        return loop

    def begin(
        self,
        prompt: str | Sequence[int] | Chat,
        params: SamplingParams | None,
        *,
        adapter: str | None,
        tenant: str,
        priority: int,
        deadline: float | None,
        request_id: str | None,
    ) -> TokenStream:
        """Starts a request; arguments and errors are those of `AsyncEngine.stream` and `chat`."""
        runtime = self.serving.runtime
        params = SamplingParams() if params is None else params
        check_arguments(params, adapter, tenant, priority, deadline, request_id)
        runtime.intake.tenants.check(tenant, adapter, priority)
        if not isinstance(prompt, (str, Chat)):
            check_prompt_type(prompt)
            runtime.intake.check_length(len(prompt), params)  # before work that a huge one would make long
            prompt = as_ids(prompt)
            runtime.intake.check_ids(prompt, "the prompt")
        name = request_id if request_id is not None else os.urandom(8).hex()
        place = runtime.admission.enter(tenant, params.n, len(prompt) if isinstance(prompt, list) else None)
        lease: AdapterLease | None = None
        try:
            lease = runtime.adapters.acquire(adapter) if adapter is not None else None
            request = runtime.intake.make_request(
                params,
                tenant=tenant,
                adapter=lease,
                priority=priority,
                deadline=deadline,
                place=place,
            )
            return self._open(name, request, prompt)
        except BaseException:
            runtime.admission.leave(place)
            if lease is not None:
                runtime.adapters.release(lease)
            raise

    def _open(self, name: str, request: Request, prompt: Prompt) -> TokenStream:
        """Begins a request. Raises InvalidRequest if the name is that of a live one, EngineClosed, EngineDead."""
        loop = current_loop()
        request_id, thread = request.request_id, self.thread
        stream = TokenStream(name, lambda: thread.cancel(request_id), loop)
        report = self._report(name, request, prompt) if self.hooks is not None else None
        self.delivery.attach(request_id, loop, stream, report)
        try:
            thread.add(request, prompt)
        except BaseException:
            self.delivery.detach(request_id)
            raise
        if report is not None:
            report.admit()
        return stream

    def _report(self, name: str, request: Request, prompt: Prompt) -> RequestReport:
        assert self.hooks is not None
        return self.hooks.report(
            name,
            request.params,
            tenant=request.tenant,
            adapter=request.adapter_name or None,
            prompt_tokens=len(prompt) if isinstance(prompt, list) else None,
            operation="chat" if isinstance(prompt, Chat) else "text_completion",
        )

    def _refusal(self) -> MotetError:
        refusal = self.thread.refusal
        assert refusal is not None, "the thread has ended"
        return refusal

    def _cancel(self, request_id: int) -> None:
        self.thread.cancel(request_id)
