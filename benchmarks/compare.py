"""motet beside its peers: the same weights, workloads and threads, interleaved on the same machine.

    python -m benchmarks.compare [--rounds 3] [--runners motet-bf16 vllm] [--loads w1 w2] [--out FOLDER/NAME]

Each runner is a process of its own, once per round; the order turns from round to round, so that a drift of the
machine's speed touches all alike. Prints the ratios of medians to what they must reach, and writes them with all
figures (NAME.md), every measurement (NAME.jsonl) and a drawing (NAME.png). W5 goes at a rate of 0.6 times what vLLM
reached in W2, and is left out without either. Peers that are not installed are named and left out: see
`peers/install.py`. The first use also writes the model, the workloads and the adapters under build/benchmarks/.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import (
    ADAPTERS_FOLDER,
    BF16_GGUF,
    MODEL_FOLDER,
    PHYSICAL_CORES,
    Q4_1_GGUF,
    WORKLOADS_FOLDER,
    make_parser,
    read_workload,
)
from benchmarks.drawing import draw
from benchmarks.ratios import Measurements, table_of_figures, table_of_ratios
from benchmarks.runners import RUNNERS, Runner

RESULTS_FOLDER = Path("benchmarks/results")
NUM_ADAPTERS = 64
SATURATION = "vllm"
SHARE_OF_SATURATION = 0.6


def prepare() -> None:
    if not WORKLOADS_FOLDER.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.workloads"], check=True)
    if not (MODEL_FOLDER.exists() and BF16_GGUF.exists() and Q4_1_GGUF.exists()):
        subprocess.run([sys.executable, "-m", "benchmarks.prepare_model"], check=True)
    if not (ADAPTERS_FOLDER / f"a{NUM_ADAPTERS - 1}").exists():
        command = [sys.executable, "-m", "benchmarks.make_adapters", "--count", str(NUM_ADAPTERS)]
        subprocess.run(command, check=True)


def chosen(names: Sequence[str] | None) -> dict[str, Runner]:
    """By default all that are installed, in the dtypes that the ratios are about."""
    names = names or [name for name, runner in RUNNERS.items() if runner.by_default]
    missing = [name for name in names if not RUNNERS[name].installed]
    for name in missing:
        print(f"{name} is left out: python -m benchmarks.peers.install {RUNNERS[name].environment}")
    return {name: RUNNERS[name] for name in names if name not in missing}


def lines_of(command: Sequence[str]) -> Iterator[str]:
    """What a runner reports, as it reports it. One that fails says so, and the comparison goes on without it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from (line for line in process.stdout if line.startswith('{"engine"'))
    if process.returncode != 0:
        print(f"{' '.join(command)} failed with exit code {process.returncode}; see above")


class Comparison:
    """The measurements of all rounds, also kept as lines of a file while they come."""

    def __init__(self, arguments: Namespace, record: Path) -> None:
        self._arguments = arguments
        self._record = record
        self.measured = Measurements()

    def run(self) -> None:
        runners = list(chosen(self._arguments.runners).items())
        for number in range(self._arguments.rounds):
            turn = number % len(runners)
            turned = runners[turn:] + runners[:turn]
            self._take(
                [sys.executable, "-m", "benchmarks.ceiling", "--threads", str(self._arguments.threads)]
            )
            for name, runner in turned:
                self._measure(name, runner, set(self._arguments.loads) - {"w5"})
            rate = self._rate()
            if rate is not None and "w5" in self._arguments.loads:
                for name, runner in turned:
                    self._measure(name, runner, {"w5"}, "--rate", f"{rate:.4g}")

    def _measure(self, name: str, runner: Runner, loads: set[str], *options: str) -> None:
        able = [load for load in runner.loads if load in loads]
        if not able:
            return
        command = [*runner.command, "--name", name, "--loads", *able, *options]
        command += ["--threads", str(self._arguments.threads), "--workloads", str(self._arguments.workloads)]
        if able == ["w5"]:
            command += ["--seconds", str(self._arguments.seconds)]
        self._take(command)

    def _take(self, command: Sequence[str]) -> None:
        for line in lines_of(command):
            print(line, end="", flush=True)
            with self._record.open("a") as record:
                record.write(line)
            self.measured.add(json.loads(line))

    def _rate(self) -> float | None:
        """Requests a second for W5."""
        if self._arguments.rate is not None:
            rate: float = self._arguments.rate
            return rate
        saturated = self.measured.median(SATURATION, "w2", "tokens_per_s")
        if saturated is None:
            print(f"W5 is left out: {SATURATION} has no W2 to take a rate from, and no --rate was given")
            return None
        requests = read_workload(self._arguments.workloads, "w5")
        return SHARE_OF_SATURATION * saturated / statistics.mean(request.max_tokens for request in requests)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runners", nargs="+", choices=RUNNERS)
    loads = ["w1", "w2", "w3", "w3b64", "w4", "w5"]
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads)
    parser.add_argument("--rate", type=float, help="requests a second in W5")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive in W5")
    parser.add_argument("--threads", type=int, default=PHYSICAL_CORES)
    parser.add_argument("--workloads", type=Path, default=WORKLOADS_FOLDER)
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / today)
    arguments = parser.parse_args()
    prepare()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record = arguments.out.with_suffix(".jsonl")
    record.unlink(missing_ok=True)
    comparison = Comparison(arguments, record)
    comparison.run()
    tables = f"{table_of_ratios(comparison.measured)}\n\n{table_of_figures(comparison.measured)}\n"
    arguments.out.with_suffix(".md").write_text(tables)
    draw(comparison.measured, arguments.out.with_suffix(".png"))
    print(f"\n{tables}\n{arguments.out}.jsonl, .md, .png")


if __name__ == "__main__":
    main()
