"""What every benchmark runner shares: its command line, its workload, its figures and how it reports them.

Peers run in environments of their own, so this module and `drive.py` need nothing but psutil.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

MODEL_FOLDER = Path("build/benchmarks/model")
WORKLOADS_FOLDER = Path("build/benchmarks/workloads")
ADAPTERS_FOLDER = Path("build/benchmarks/adapters")
GGUF_ADAPTERS_FOLDER = Path("build/benchmarks/adapters-gguf")
BF16_GGUF = Path("build/benchmarks/model-bf16.gguf")
Q4_1_GGUF = Path("build/benchmarks/model-q4_1.gguf")
PEERS_FOLDER = Path("build/peers")
INSTALLED = "installed"  # a file in a peer's folder, once its installation has succeeded

DTYPES = ("float32", "bfloat16")
MiB = 1 << 20
PHYSICAL_CORES = psutil.cpu_count(logical=False) or 1


class Request(NamedTuple):
    """One line of a workload file."""

    id: int
    prompt: list[int]
    max_tokens: int
    adapter: str | None = None
    gap: float | None = None  # inter-arrival time with mean 1; a runner divides it by its request rate


class Timing(NamedTuple):
    """When a request was sent and when the caller saw each of its tokens, both by `time.perf_counter`."""

    sent: float
    tokens: list[float]


def runner_arguments(
    description: str | None,
    name: str,
    workloads: Sequence[str],
    default: Sequence[str],
    model: Path = MODEL_FOLDER,
) -> argparse.ArgumentParser:
    """The command line of a runner that can do `workloads` and does `default` unless told."""
    parser = make_parser(description)
    parser.add_argument("--name", default=name, help="what its figures are reported under")
    parser.add_argument("--model", default=str(model), help="what prepare_model.py wrote")
    parser.add_argument("--workloads", type=Path, default=WORKLOADS_FOLDER, help="what workloads.py wrote")
    parser.add_argument("--loads", nargs="+", choices=workloads, default=default)
    parser.add_argument("--threads", type=int, default=PHYSICAL_CORES)
    if "w5" in workloads:
        rate_help = "arrivals per second in w5; default: 0.6 times what it reached in w2 before"
        parser.add_argument("--rate", type=float, help=rate_help)
        parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive in w5")
    return parser


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def read_workload(folder: Path, name: str) -> list[Request]:
    with (folder / f"{name}.jsonl").open() as lines:
        return [Request(**json.loads(line)) for line in lines]


def report(engine: str, test: str, **figures: float) -> None:
    """One JSON object on one line of standard output, which `compare.py` reads."""
    rounded = {key: float(f"{value:.5g}") for key, value in figures.items()}
    print(json.dumps({"engine": engine, "test": test, **rounded}), flush=True)


def report_startup(engine: str, first_token: float) -> None:
    """Seconds from the start of this process to a moment of `time.perf_counter`, its first token's."""
    age = time.time() - psutil.Process().create_time()
    report(engine, "startup", seconds=age - (time.perf_counter() - first_token))


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over equal-keyed rows."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def single_figures(timing: Timing) -> dict[str, float]:
    """One request alone: times in ms, output tokens/s from sending to the last token and from the first to the last."""
    gaps = [later - earlier for earlier, later in zip(timing.tokens, timing.tokens[1:], strict=False)]
    return {
        "tokens_per_s": len(timing.tokens) / (timing.tokens[-1] - timing.sent),
        "decode_tokens_per_s": 1 / statistics.mean(gaps),
        "ttft_ms": 1e3 * (timing.tokens[0] - timing.sent),
        "itl_ms": 1e3 * statistics.mean(gaps),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
    }


def batch_figures(requests: Sequence[Request], seconds: float) -> dict[str, float]:
    """Many requests at once. Only the tokens that were asked for count."""
    output_tokens = sum(request.max_tokens for request in requests)
    prompt_tokens = sum(len(request.prompt) for request in requests)
    return {
        "seconds": seconds,
        "tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (output_tokens + prompt_tokens) / seconds,
    }


def latency_figures(timings: Sequence[Timing]) -> dict[str, float]:
    """What the callers of many concurrent streams saw, in ms."""
    ttft = [timing.tokens[0] - timing.sent for timing in timings]
    gaps = [b - a for timing in timings for a, b in zip(timing.tokens, timing.tokens[1:], strict=False)]
    return {
        "ttft_p50_ms": 1e3 * percentile(ttft, 50),
        "ttft_p99_ms": 1e3 * percentile(ttft, 99),
        "itl_p50_ms": 1e3 * percentile(gaps, 50),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
    }


class PeakMemory:
    """Samples the resident memory of this process and its children while the `with` block runs."""

    def __init__(self, every: float = 0.25) -> None:
        self.peak_mib = 0
        self._every = every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        this = psutil.Process()
        while not self._done.wait(self._every):
            resident = this.memory_info().rss
            for child in this.children(recursive=True):
                try:
                    resident += child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue  # it ended between the listing and the question
            self.peak_mib = max(self.peak_mib, resident // MiB)
