"""`motet batch`: every line of a JSONL file answered once, whatever kills the process in between."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import anyio
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from motet import (
    AdapterNotFound,
    AsyncEngine,
    Completion,
    EngineConfig,
    EngineDead,
    InvalidRequest,
    MotetError,
    SamplingParams,
)
from motet.cli.options import first_mistake

QUEUED_SHARE = 0.25
"""So many requests beyond those that run wait for a seat, so that none ever stays empty."""

OWN_FIELDS = ("id", "prompt", "messages", "tools", "adapter", "tenant")
"""Of a line; all others are SamplingParams'."""

MOST_NUMBERS = 10
"""Of failed lines that the last message lists."""

Key = tuple[str, str]
"""What names a line's result: its id, or its number where it has none that serves."""


def run(
    source: Path,
    target: Path,
    model: str,
    adapters: Mapping[str, Path],
    config: EngineConfig,
    *,
    retry_failed: bool = False,
) -> bool:
    """Appends a result to `target` for each line of `source` that has none yet. Whether all results are good.

    retry_failed: errors that `target` holds are taken out first, so that their lines have no result yet.
    Raises InvalidRequest for files that cannot be those of a batch, OSError for those that cannot be read or written.
    """
    if target.exists() and not target.is_file():
        raise InvalidRequest(f"{target} is no regular file: results are read again when a batch goes on")
    if target.exists() and source.samefile(target):
        raise InvalidRequest(f"{target} is the file of requests, too: name another one for the results")
    if retry_failed and target.exists():
        _take_out_errors(target.resolve())  # not a link to it: that would be replaced
    with target.open("a+b") as out, source.open("rb") as lines:
        _claim(out)
        results = Results(out)
        total = None  # of a pipe, which can be read only once
        if lines.seekable():
            total = sum(1 for line in lines if line.strip())
            lines.seek(0)
        work = results.missing(lines)
        first = next(work, None)  # a finished batch needs no model
        if first is not None:
            anyio.run(_answer_all, results, _chain(first, work), total, model, adapters, config)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"{results.num_good} answered, {results.num_failed} failed: {target}", markup=False)
    if results.failed_lines:
        numbers = ", ".join(map(str, sorted(results.failed_lines)[:MOST_NUMBERS]))
        others = len(results.failed_lines) - MOST_NUMBERS
        listed = numbers if others <= 0 else f"{numbers} and {others} more"
        console.print(f"failed lines: {listed}; --retry-failed asks them again", markup=False)
    return results.num_failed == 0


def _take_out_errors(target: Path) -> None:
    """Replaces the file of results by one with the good ones, at a stroke: killed at any moment, it is one of the two.

    Raises as `Results`.
    """
    beside = target.with_name(f".{target.name}.retry")
    with target.open("r+b") as old:
        _claim(old)  # until the end: what another process appended meanwhile would be lost
        try:
            with beside.open("wb") as new:
                for line, _, failed in _whole_results(old):
                    if not failed:
                        new.write(line)
                new.flush()
                os.fsync(new.fileno())  # it replaces what may have been safe on the disk for days
            shutil.copymode(target, beside)
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def _claim(out: BinaryIO) -> None:
    """Keeps a second process off the file until this one closes it, where the system can do that."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(out.fileno()), os.stat(out.name)):  # replaced since it was opened
            raise BlockingIOError
    except BlockingIOError:
        raise InvalidRequest(
            f"another `motet batch` writes {out.name}: wait for it, or name another file"
        ) from None


class Results:
    """The file of results: what is done already, and a place for more.

    A result is one line, written whole; what a killed process left unfinished at the end is cut off.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._good: set[Key] = set()
        self._failed: set[Key] = set()
        self.failed_lines: list[int] = []
        """Numbers of the lines with an error that `missing` and `add` have seen."""
        file.seek(0)
        whole = 0
        for line, key, failed in _whole_results(file):
            (self._failed if failed else self._good).add(key)
            whole += len(line)
        file.truncate(whole)

    @property
    def num_good(self) -> int:
        return len(self._good)

    @property
    def num_failed(self) -> int:
        return len(self._failed)

    @property
    def num_done(self) -> int:
        return self.num_good + self.num_failed

    def missing(self, lines: Iterable[bytes]) -> Iterator[tuple[int, Key, dict[str, Any] | str]]:
        """(number, key, content or what is wrong with it) of each line without a result."""
        seen: Counter[Key] = Counter()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            content = _read_line(line)
            key = ("line", str(number))
            if not isinstance(content, str):
                own = ("id", _canonical(content["id"]))
                seen[own] += 1
                if seen[own] == 1:
                    key = own
                else:
                    content = f"the id {own[1]} is that of an earlier line"
            if key in self._failed:
                self.failed_lines.append(number)
            elif key not in self._good:
                yield number, key, content

    def add(self, key: Key, number: int, result: Mapping[str, Any]) -> None:
        """Appends and flushes one result; the system keeps it even if this process is killed now."""
        named = {"line": number} if key[0] == "line" else {"id": json.loads(key[1])}
        line = json.dumps({**named, **result}, ensure_ascii=False) + "\n"
        self._file.write(line.encode("utf-8", "backslashreplace"))  # a lone surrogate, as JSON spells it
        self._file.flush()
        if "error" in result:
            self._failed.add(key)
            self.failed_lines.append(number)
        else:
            self._good.add(key)


def _whole_results(file: BinaryIO) -> Iterator[tuple[bytes, Key, bool]]:
    """(line, key, whether it is an error) of each result but a last one that is torn.

    Raises InvalidRequest at a line that is no result.
    """
    for number, line in enumerate(file, 1):
        is_whole = line.endswith(b"\n")
        try:
            result = _read_result(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if not is_whole and isinstance(error, ValueError) and _begins_a_result(line):
                return
            raise InvalidRequest(
                f"line {number} of {file.name} is no result of `motet batch`: name another file, or move it away"
            ) from error
        if is_whole:
            yield line, *result


def _read_result(line: bytes) -> tuple[Key, bool]:
    """What a line of results is the result of, and whether that failed.

    Raises ValueError if it is no JSON; KeyError, TypeError or RecursionError if it is JSON of another kind.
    """
    result = json.loads(line)
    key = ("id", _canonical(result["id"])) if "id" in result else ("line", str(result["line"]))
    failed = "error" in result
    if not failed:
        result["text"]
    return key, failed


def _begins_a_result(line: bytes) -> bool:
    return any(begin.startswith(line[: len(begin)]) for begin in (b'{"id": ', b'{"line": '))


def _canonical(line_id: object) -> str:
    """1 and "1" are two ids."""
    return json.dumps(line_id, sort_keys=True)


def _read_line(line: bytes) -> dict[str, Any] | str:
    """The line's object, or what is wrong with it."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(content, dict):
        return f"a JSON object is expected, not {type(content).__name__}"
    if not isinstance(content.get("id"), (str, int)) or isinstance(content["id"], bool):
        return "`id` must be a string or an integer"
    return content


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


async def _answer_all(
    results: Results,
    work: Iterator[tuple[int, Key, dict[str, Any] | str]],
    total: int | None,
    model: str,
    adapters: Mapping[str, Path],
    config: EngineConfig,
) -> None:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
    queued = max(1, int(config.max_num_seqs * QUEUED_SHARE))
    if config.max_waiting is not None:
        queued = min(queued, config.max_waiting)
    ends: list[EngineDead | OSError] = []
    with progress:
        bar = progress.add_task("starting", total=total, completed=results.num_done, rate=0.0)

        async def answer_some() -> None:
            for number, key, content in work:  # one iterator for all: each line is taken once
                try:
                    result = await _answer_or_error(engine, content)
                    results.add(key, number, result)
                    rate = engine.stats().tokens_per_second
                except (
                    EngineDead,
                    OSError,
                ) as error:  # of all lines, not of this one: it stays to be answered
                    ends.append(error)
                    group.cancel_scope.cancel()
                    return
                if "error" in result:
                    message = f"line {number}: {result['error']['message']}"
                    progress.console.print(message, style="yellow", markup=False)
                progress.update(bar, completed=results.num_done, rate=rate)

        async with AsyncEngine(model, config) as engine:
            for name, path in adapters.items():
                await engine.load_adapter(name, path)
            progress.update(bar, description="answering")
            async with anyio.create_task_group() as group:
                for _ in range(config.max_num_seqs + queued):
                    group.start_soon(answer_some)
            if ends:
                raise ends[0]


async def _answer_or_error(engine: AsyncEngine, content: dict[str, Any] | str) -> dict[str, Any]:
    """One line's result. Raises EngineDead."""
    try:
        return await _answer(engine, content)
    except EngineDead:
        raise
    except MotetError as error:
        return {"error": {"type": type(error).__name__, "message": str(error)}}


async def _answer(engine: AsyncEngine, content: dict[str, Any] | str) -> dict[str, Any]:
    """One line's result. Raises InvalidRequest for a line that asks for nothing sensible, or what the engine raises."""
    if isinstance(content, str):
        raise InvalidRequest(content)
    own = {name: content[name] for name in OWN_FIELDS if content.get(name) is not None}
    options = {name: value for name, value in content.items() if name not in OWN_FIELDS}
    try:
        params = SamplingParams.model_validate_json(json.dumps(options))  # as JSON: a list is a tuple there
    except ValidationError as error:
        raise InvalidRequest(first_mistake(error)) from error
    if ("prompt" in own) == ("messages" in own):
        raise InvalidRequest("exactly one of `prompt` and `messages` is expected")
    if "prompt" in own and "tools" in own:
        raise InvalidRequest("`tools` belong to `messages`, not to a prompt")
    to_whom = {name: own[name] for name in ("adapter", "tenant") if name in own}
    start = (
        partial(engine.stream, own["prompt"], params, **to_whom)
        if "prompt" in own
        else partial(engine.chat, own["messages"], params, tools=own.get("tools"), **to_whom)
    )
    try:
        async with start() as stream:
            return _as_json(await stream.result(), params)
    except AdapterNotFound as error:  # whose advice is a programmer's
        loaded = ", ".join(repr(adapter.name) for adapter in engine.adapters()) or "none"
        message = (
            f"no adapter {own['adapter']!r} is loaded: give it by --adapter NAME=PATH (loaded: {loaded})"
        )
        raise AdapterNotFound(message) from error


def _as_json(completion: Completion, params: SamplingParams) -> dict[str, Any]:
    usage = completion.usage
    outputs = [
        {
            "index": output.index,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **({} if output.logprobs is None else {"logprobs": output.logprobs}),
        }
        for output in completion.outputs
    ]
    first = {name: value for name, value in outputs[0].items() if name != "index"}
    result: dict[str, Any] = first if len(outputs) == 1 else {**first, "outputs": outputs}
    if params.prompt_logprobs is not None:
        result["prompt_logprobs"] = completion.prompt_logprobs
    result["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "preemptions": usage.preemptions,
        "queue_time": usage.queue_time,
        "ttft": usage.ttft,
        "total_time": usage.total_time,
    }
    return result
