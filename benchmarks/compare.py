"""motet beside its peers: the same weights, workloads and threads, interleaved on the same machine.

    python -m benchmarks.compare [--rows w1 w2] [--rounds 3] [--runners motet-bf16 vllm] [--out FOLDER/NAME]

A row (see `rows.py`) is a set of runners under the same workload. Each runner is a process of its own, once per round;
the order turns from round to round. Prints what ours must reach and what it reached, and writes it with all figures
(NAME.md), every measurement (NAME.jsonl) and a drawing (NAME.png) after every row. What NAME.jsonl holds already is
not measured again: interrupted, the same command goes on where it ended. Peers that are not installed are named and
left out: see `peers/install.py`. The first use also writes models, workloads and adapters under build/benchmarks/.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

from benchmarks.common import (
    ADAPTERS_FOLDER,
    BF16_GGUF,
    GGUF_ADAPTERS_FOLDER,
    MODEL_FOLDER,
    PHYSICAL_CORES,
    Q4_1_GGUF,
    WORKLOADS_FOLDER,
    make_parser,
)
from benchmarks.comparison import Comparison
from benchmarks.drawing import draw
from benchmarks.ratios import table_of_figures, table_of_ratios
from benchmarks.record import Record
from benchmarks.rows import ROWS
from benchmarks.runners import RUNNERS

RESULTS_FOLDER = Path("benchmarks/results")
LAST_ADAPTER = "a63"


def prepare() -> None:
    """Writes what is not there yet."""
    models = MODEL_FOLDER.exists() and BF16_GGUF.exists() and Q4_1_GGUF.exists()
    converted = (GGUF_ADAPTERS_FOLDER / f"{LAST_ADAPTER}.gguf").exists()
    there = {
        "workloads": WORKLOADS_FOLDER.exists(),
        "prepare_model": models,
        "make_adapters": (ADAPTERS_FOLDER / LAST_ADAPTER).exists(),
        "peers.convert_adapters": converted or not RUNNERS["llama-server-lora"].installed,
    }
    for module, exists in there.items():
        if not exists:
            subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=True)


def write_results(record: Record, out: Path) -> str:
    """Returns the table of ratios."""
    rows = {name: measured for name, measured in record.rows().items() if name in ROWS}
    ratios = table_of_ratios(rows, {name: row.floors for name, row in ROWS.items()})
    figures = [f"## {name}\n\n{table_of_figures(measured)}" for name, measured in rows.items()]
    out.with_suffix(".md").write_text("\n\n".join([ratios, *figures]) + "\n")
    draw(rows, out.with_suffix(".png"))
    return ratios


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, help="default: all of a row's")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive in w5")
    parser.add_argument("--threads", type=int, default=PHYSICAL_CORES)
    parser.add_argument("--workloads", type=Path, default=WORKLOADS_FOLDER)
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / today)
    arguments = parser.parse_args()
    prepare()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = {name for row in arguments.rows for name in ROWS[row].runners}
    for name in sorted(wanted):
        if not RUNNERS[name].installed:
            print(f"{name} is left out: python -m benchmarks.peers.install {RUNNERS[name].environment}")
    record = Record(arguments.out.with_suffix(".jsonl"))
    comparison = Comparison(arguments, record)
    for name in arguments.rows:
        comparison.run(name)
        print(f"\n{write_results(record, arguments.out)}\n{arguments.out}.jsonl, .md, .png\n", flush=True)


if __name__ == "__main__":
    main()
