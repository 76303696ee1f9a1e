"""motet beside transformers on W1 and W2: same model, dtype and threads, interleaved on the same machine.

    python -m benchmarks.compare [--rounds 3] [--dtype float32] [--threads 2]

Each engine runs in a process of its own, once per round; the order turns from round to round, so that a drift of
the machine's speed touches all alike. Prints the median over the rounds, and motet's ratios to its peers. The first
use also writes the model and the workloads under build/benchmarks/.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.common import DTYPES, MODEL_FOLDER, PHYSICAL_CORES, WORKLOADS_FOLDER, make_parser

RUNNERS = (
    "benchmarks.engine",
    "benchmarks.peers.transformers_static",
    "benchmarks.peers.transformers_continuous",
)
OURS = "motet"
SHOWN = ("tokens_per_s", "ttft_ms", "itl_ms", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "peak_mib")

Results = dict[tuple[str, str], list[dict[str, float]]]
"""(engine, test) -> the figures of each round."""


def run_module(*command: str) -> Iterator[str]:
    """Lines of `python -m …` as it prints them; its standard error passes through."""
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}; see above")


def prepare() -> None:
    if not WORKLOADS_FOLDER.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.workloads"], check=True)
    if not MODEL_FOLDER.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.prepare_model"], check=True)


def measure(arguments: Namespace) -> Results:
    results: Results = defaultdict(list)
    for round_number in range(arguments.rounds):
        turn = round_number % len(RUNNERS)
        for runner in RUNNERS[turn:] + RUNNERS[:turn]:
            for line in run_module(runner, "--dtype", arguments.dtype, "--threads", str(arguments.threads)):
                if line.startswith("{"):
                    print(line, end="", flush=True)
                    figures = json.loads(line)
                    results[figures.pop("engine"), figures.pop("test")].append(figures)
    return results


def median(results: Results, engine: str, test: str, figure: str) -> float:
    return statistics.median(figures[figure] for figures in results[engine, test])


def print_summary(results: Results) -> None:
    for engine, test in sorted(results, key=lambda key: (key[1], key[0])):
        figures = [figure for figure in SHOWN if figure in results[engine, test][0]]
        values = "  ".join(f"{figure} {median(results, engine, test, figure):,.1f}" for figure in figures)
        print(f"{test:7}{engine:25}{values}")
    for test in ("w1", "w2"):
        ours = median(results, OURS, test, "tokens_per_s")
        for peer in sorted(engine for engine, name in results if name == test and engine != OURS):
            print(f"{test}: {ours / median(results, peer, test, 'tokens_per_s'):.2f} x {peer}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=PHYSICAL_CORES)
    arguments = parser.parse_args()
    prepare()
    print_summary(measure(arguments))


if __name__ == "__main__":
    main()
