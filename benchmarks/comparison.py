"""Measures rows of the comparison: every runner a process of its own, in turns, round by round."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from collections.abc import Sequence

from benchmarks.record import Line, Record
from benchmarks.rows import ROWS, Row
from benchmarks.runners import RUNNERS


def reported(command: Sequence[str]) -> list[Line]:
    """What a runner reports; nothing, and a word about it, if it fails: the comparison goes on without it."""
    lines: list[Line] = []
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"engine"'):
                print(line, end="", flush=True)
                lines.append(json.loads(line))
    if process.returncode == 0:
        return lines
    print(f"{' '.join(command)} failed with exit code {process.returncode}; see above")
    return []


class Comparison:
    def __init__(self, arguments: Namespace, record: Record) -> None:
        self._arguments = arguments
        self._record = record

    def run(self, name: str) -> None:
        row = ROWS[name]
        for number in range(self._arguments.rounds):
            self._measure(name, number, "ceiling", RUNNERS["ceiling"].command)
            for runner in self._runners(row, number):
                options = self._options(name, row, number, runner)
                if options is not None:
                    command = [*RUNNERS[runner].command, "--name", runner, *options]
                    self._measure(name, number, runner, command)

    def _runners(self, row: Row, number: int) -> list[str]:
        """Those of this round."""
        chosen = self._arguments.runners or row.runners
        able = [name for name in row.order(number) if name in chosen and RUNNERS[name].installed]
        return [name for name in able if number < row.rounds_of(name, self._arguments.rounds)]

    def _options(self, name: str, row: Row, number: int, runner: str) -> list[str] | None:
        """What the row asks of a runner; None if it asks for a rate that nobody has reached."""
        loads = row.runners[runner]
        options = ["--loads", *loads, "--workloads", str(self._arguments.workloads)] if loads else []
        if "w5" not in loads:
            return options
        options += ["--seconds", str(self._arguments.seconds)]
        if runner == row.rate_of:
            return options
        rates = self._record.rows()[name].values(str(row.rate_of), "w5", "rate")
        if number not in rates:
            print(f"{runner} is left out of {name}: {row.rate_of}, which sets its rate, was not measured")
            return None
        return [*options, "--rate", f"{rates[number]:.5g}"]

    def _measure(self, row: str, number: int, runner: str, command: Sequence[str]) -> None:
        if self._record.has(row, number, runner):
            return
        print(f"{row}, round {number + 1}: {runner}", flush=True)
        threads = str(self._arguments.threads)
        self._record.add(row, number, runner, reported([*command, "--threads", threads]))
