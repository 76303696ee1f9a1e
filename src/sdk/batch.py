"""Many prompts through one engine, of which only as many are live at once as keep it busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import anyio
from anyio.lowlevel import checkpoint

from motet.config import EngineConfig
from motet.errors import DeadlineExceeded, InvalidRequest, MotetError, QueueFull, QuotaExceeded
from motet.params import SamplingParams
from motet.sdk.arguments import MIN_DEADLINE, check_arguments
from motet.sdk.outputs import Completion
from motet.sdk.stream import TokenStream

T = TypeVar("T")

Result = Completion | MotetError
Report = Callable[[Result], None]

SHORTEST_WAIT, LONGEST_WAIT = 0.01, 1.0
"""Seconds between two looks for a place in a queue that others have filled."""


async def run_batch(
    stream: Callable[..., TokenStream],
    config: EngineConfig,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams | None] | None,
    *,
    progress: bool,
    adapter: str | Sequence[str | None] | None,
    tenant: str,
    priority: int,
    deadline: float | None,
    request_id: str | None,
) -> list[Result]:
    """What `AsyncEngine.generate_batch` does, by an engine's `stream` and config."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    check_arguments(SamplingParams(), None, tenant, priority, deadline, request_id)
    count = len(prompts)
    each_params = _one_each(params, count, "params", SamplingParams)
    each_adapter = _one_each(adapter, count, "adapter", str)
    end = None if deadline is None else time.monotonic() + deadline

    def begin(index: int) -> TokenStream:
        left = None if end is None else end - time.monotonic()
        if left is not None and left < MIN_DEADLINE:
            raise DeadlineExceeded("the batch's deadline passed before this request began")
        return stream(
            prompts[index],
            each_params[index],
            adapter=each_adapter[index],
            tenant=tenant,
            priority=priority,
            deadline=left,
            request_id=None if request_id is None else f"{request_id}-{index}",
        )

    results: dict[int, Result] = {}
    indices = iter(range(count))  # shared: requests begin in order

    async def work() -> None:
        for index in indices:
            results[index] = await _run(begin, index)
            report(results[index])
            await checkpoint()  # a run of prompts that fail at once must not hold up the loop

    with _progress_bar(count) if progress else nullcontext(lambda result: None) as report:
        async with anyio.create_task_group() as group:
            for _ in range(min(count, _num_live(config))):
                group.start_soon(work)
    return [results[index] for index in range(count)]


async def _run(begin: Callable[[int], TokenStream], index: int) -> Result:
    while True:
        try:
            async with begin(index) as stream:
                return await stream.result()
        except (QueueFull, QuotaExceeded) as refusal:
            await anyio.sleep(min(max(refusal.retry_after, SHORTEST_WAIT), LONGEST_WAIT))
        except MotetError as error:
            return error


def _one_each(value: T | Sequence[T], count: int, what: str, kind: type[T]) -> Sequence[T]:
    """One value for all prompts, or one per prompt, as one per prompt. Raises InvalidRequest."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence):
        raise InvalidRequest(
            f"{what} must be a {kind.__name__} or one per prompt, not {type(value).__name__}"
        )
    if len(value) != count:
        raise InvalidRequest(
            f"{what} has {len(value)} entries for {count} prompts: give one, or one per prompt"
        )
    return value


def _num_live(config: EngineConfig) -> int:
    """How many requests of one batch may be live: as many as run, and others to take their places at once.

    Of a queue that is bounded, half is left to others.
    """
    queued = config.max_num_seqs if config.max_waiting is None else config.max_waiting // 2
    return config.max_num_seqs + min(config.max_num_seqs, queued)


@contextmanager
def _progress_bar(total: int) -> Iterator[Report]:
    """A bar on stderr; gives what is to be told each result."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise InvalidRequest("progress=True needs the package rich: pip install 'motet[progress]'") from error
    counts = TextColumn("{task.fields[tokens]} tokens, {task.fields[failed]} failed")
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), counts)
    tokens = failed = 0

    def report(result: Result) -> None:
        nonlocal tokens, failed
        if isinstance(result, Completion):
            tokens += result.usage.output_tokens
        else:
            failed += 1
        bar.update(task, advance=1, tokens=tokens, failed=failed)

    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, tokens=0, failed=0)
        yield report
