"""What was measured: lines of a file, so that an interrupted comparison goes on where it ended."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

Line = Mapping[str, object]
"""A line as `common.report` prints it, with the row, the round and the runner that it came from."""


class Measurements:
    """What each engine reported of each test in one row of the comparison, by round."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], dict[int, dict[str, float]]] = defaultdict(dict)

    def add(self, line: Line) -> None:
        figures = {key: value for key, value in line.items() if isinstance(value, (int, float))}
        number = int(figures.pop("round"))
        self._rounds[str(line["engine"]), str(line["test"])][number] = figures

    def engines(self, test: str) -> list[str]:
        return [engine for engine, name in self._rounds if name == test]

    def values(self, engine: str, test: str, figure: str) -> dict[int, float]:
        """By round; none if it was not measured."""
        rounds = self._rounds.get((engine, test), {})
        return {number: figures[figure] for number, figures in rounds.items() if figure in figures}

    def median(self, engine: str, test: str, figure: str) -> float | None:
        values = self.values(engine, test, figure)
        return statistics.median(values.values()) if values else None

    def ratio(self, ours: tuple[str, str], other: tuple[str, str], figure: str) -> float | None:
        """The median of the rounds' ratios: the machine's speed drifts less within a round than between two."""
        mine, theirs = self.values(*ours, figure), self.values(*other, figure)
        ratios = [mine[number] / theirs[number] for number in mine if number in theirs]
        return statistics.median(ratios) if ratios else None


class Record:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[Line] = []
        if path.exists():
            self._lines = [json.loads(line) for line in path.read_text().splitlines()]

    def has(self, row: str, number: int, runner: str) -> bool:
        wanted = (row, number, runner)
        return any((line["row"], line["round"], line["runner"]) == wanted for line in self._lines)

    def add(self, row: str, number: int, runner: str, reported: Sequence[Line]) -> None:
        """All that one process reported, in one piece: a process that was interrupted leaves nothing."""
        lines = [{"row": row, "round": number, "runner": runner, **line} for line in reported]
        self._lines += lines
        with self._path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def rows(self) -> dict[str, Measurements]:
        rows: dict[str, Measurements] = defaultdict(Measurements)
        for line in self._lines:
            rows[str(line["row"])].add(line)
        return rows
