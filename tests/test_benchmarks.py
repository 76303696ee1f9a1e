"""The benchmarks' own arithmetic and order: percentiles, medians, verdicts, arrivals, what is measured again."""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import comparison
from benchmarks.common import Request, Timing, percentile, single_figures
from benchmarks.drive import over_time, unsaturated
from benchmarks.ratios import SHOWN, Floor, table_of_figures
from benchmarks.record import Line, Measurements, Record
from benchmarks.rows import ROWS, Row
from benchmarks.runners import RUNNERS
from hypothesis import given
from hypothesis import strategies as st

SPEED = Floor("speed", "tokens_per_s", ("motet", "w2"), (("slow", "w2"), ("fast", "w2")), 1.5)
WAIT = Floor("wait", "ttft_ms", ("motet", "w2"), (("slow", "w2"), ("fast", "w2")), 0.5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-6)


def test_one_stream_s_figures_count_decoding_from_its_first_token() -> None:
    figures = single_figures(Timing(10.0, [12.0, 12.5, 13.0]))
    assert figures["ttft_ms"] == 2000
    assert figures["tokens_per_s"] == 1
    assert figures["decode_tokens_per_s"] == 2


def measured(**engines: list[tuple[float, float]]) -> Measurements:
    measurements = Measurements()
    for engine, rounds in engines.items():
        for number, (speed, wait) in enumerate(rounds):
            line = {"engine": engine, "test": "w2", "round": number, "tokens_per_s": speed, "ttft_ms": wait}
            measurements.add(line)
    return measurements


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    """In the second round the machine is at half its speed: a ratio across rounds would tell of that."""
    those = measured(motet=[(40, 10), (20, 20), (60, 10)], fast=[(20, 20), (10, 40)])
    assert SPEED.verdict(those) == "| speed | 40 | 15 fast | 2.00 | ≥ 1.5 | yes (without slow) |"
    assert WAIT.verdict(those) == "| wait | 10 | 30 fast | 0.50 | ≤ 0.5 | yes (without slow) |"


def test_ours_is_held_against_the_hardest_of_the_others() -> None:
    those = measured(motet=[(30, 40)], slow=[(10, 99)], fast=[(21, 90)])
    assert SPEED.verdict(those) == "| speed | 30 | 21 fast | 1.43 | ≥ 1.5 | **no** |"
    assert WAIT.verdict(those) == "| wait | 40 | 90 fast | 0.44 | ≤ 0.5 | yes |"


def test_what_is_not_reached_or_not_measured_is_said() -> None:
    assert "| **no** (without slow) |" in SPEED.verdict(measured(motet=[(20, 50)], fast=[(20, 90)]))
    assert "| **no** |" in WAIT.verdict(measured(motet=[(20, 50)], slow=[(10, 99)], fast=[(20, 90)]))
    assert "not measured" in SPEED.verdict(measured(motet=[(20, 50)]))
    assert "not measured" in SPEED.verdict(measured(fast=[(20, 50)]))


def test_a_floor_without_others_is_held_by_the_figure_itself() -> None:
    alone = Floor("share", "share", ("motet", "decode 8"), (), 0.72)
    measurements = Measurements()
    assert "not measured" in alone.verdict(measurements)
    for number, share in enumerate((0.9, 0.71, 0.7)):
        measurements.add({"engine": "motet", "test": "decode 8", "round": number, "share": share})
    assert alone.verdict(measurements) == "| share | 0.71 | | | ≥ 0.72 | **no** |"


def test_the_table_has_a_line_for_each_engine_and_gaps_where_it_has_no_figure() -> None:
    table = table_of_figures(measured(motet=[(1234, 40), (1236, 40)], slow=[(10, 99)]))
    assert "| motet | 1,235 |" in table
    assert "| slow | 10 | " in table
    assert table.splitlines()[-1].endswith("|  | 1 |")


def test_every_row_of_the_comparison_names_runners_that_exist_and_holds_floors_of_its_own_runners() -> None:
    for row in ROWS.values():
        assert row.runners.keys() <= RUNNERS.keys()
        for floor in row.floors:
            for engine, test in (floor.ours, *floor.others):
                loads = row.runners[engine]
                assert test in loads or test == "memory" or not loads
                assert floor.figure in SHOWN[test]


def test_whom_no_floor_names_is_measured_in_the_first_round_alone() -> None:
    assert ROWS["w2"].rounds_of("vllm", 3) == 3
    assert ROWS["w2"].rounds_of("transformers", 3) == 1
    assert ROWS["w2"].rounds_of("transformers", 0) == 0


def test_the_order_turns_and_whose_saturation_sets_the_rate_stays_first() -> None:
    row = Row({"a": ("w5",), "source": ("w2", "w5"), "b": ("w5",)}, rate_of="source")
    assert [row.order(number) for number in range(3)] == [
        ["source", "a", "b"],
        ["source", "b", "a"],
        ["source", "a", "b"],
    ]


def runner_that_reports(tmp_path: Path) -> list[str]:
    """A process that counts how often it ran, and fails when it is told a rate of 0."""
    script = tmp_path / "runner.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "name = sys.argv[sys.argv.index('--name') + 1] if '--name' in sys.argv else 'ceiling'\n"
        f"with pathlib.Path({str(tmp_path / 'ran')!r}).open('a') as ran: ran.write(name + '\\n')\n"
        "print('noise')\n"
        "print(json.dumps({'engine': name, 'test': 'w2', 'tokens_per_s': 5}))\n"
        f"sys.exit(pathlib.Path({str(tmp_path / 'broken')!r}).exists() and name == 'b')\n"
    )
    return [sys.executable, str(script)]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Compares two such processes in two rounds, and writes the results."""
    command = runner_that_reports(tmp_path)
    monkeypatch.setattr(comparison, "ROWS", {"row": Row({"a": ("w2",), "b": ("w2",)}, rate_of="a")})
    fake = SimpleNamespace(command=command, installed=True)
    monkeypatch.setattr(comparison, "RUNNERS", {"a": fake, "b": fake, "ceiling": fake})
    arguments = Namespace(rounds=2, runners=None, threads=1, seconds=1.0, workloads=tmp_path)

    def run() -> None:
        record = Record(tmp_path / "results.jsonl")
        comparison.Comparison(arguments, record).run("row")

    return run


def ran(tmp_path: Path) -> list[str]:
    return (tmp_path / "ran").read_text().split()


def test_an_interrupted_comparison_goes_on_where_it_ended(
    tmp_path: Path, compare: Callable[[], None]
) -> None:
    (tmp_path / "broken").touch()
    compare()
    first = ran(tmp_path)
    assert first.count("a") == 2
    (tmp_path / "broken").unlink()
    compare()
    assert ran(tmp_path)[len(first) :] == ["b"]  # what had failed, and nothing else
    compare()
    assert len(ran(tmp_path)) == len(first) + 1


def test_w5_s_waiting_counts_from_a_request_s_due_time() -> None:
    """An engine that serves one at a time makes the second wait for the first."""
    one_at_a_time = asyncio.Lock()
    requests = [Request(i, [1], 2, gap=gap) for i, gap in enumerate((1.0, 0.0, 1000.0))]

    async def send(request: Request) -> Timing:
        sent = time.perf_counter()
        async with one_at_a_time:
            await asyncio.sleep(0.1)
        now = time.perf_counter()
        return Timing(sent, [now, now])

    figures = asyncio.run(over_time(requests, send, rate=100, seconds=1))
    assert figures["ttft_p99_ms"] >= 195
    assert 4 / figures["tokens_per_s"] == pytest.approx(figures["seconds"])  # the third came too late


def test_w5_s_rate_is_six_tenths_of_the_requests_that_saturate_an_engine() -> None:
    assert unsaturated(300, [Request(0, [1], 50), Request(1, [1], 150)]) == pytest.approx(1.8)


def test_w5_s_rate_goes_from_the_row_s_source_to_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: dict[str, list[str]] = {}

    def reported(command: list[str]) -> list[Line]:
        commands[command[0]] = command
        return [{"engine": command[0], "test": "w5", "rate": 1.5}]

    runners = {name: SimpleNamespace(command=[name], installed=True) for name in ("a", "b", "ceiling")}
    monkeypatch.setattr(comparison, "RUNNERS", runners)
    monkeypatch.setattr(comparison, "ROWS", {"row": Row({"b": ("w5",), "a": ("w2", "w5")}, rate_of="a")})
    monkeypatch.setattr(comparison, "reported", reported)
    arguments = Namespace(rounds=1, runners=None, threads=1, seconds=1.0, workloads=tmp_path)
    comparison.Comparison(arguments, Record(tmp_path / "results.jsonl")).run("row")
    assert "--rate" not in commands["a"]
    assert commands["b"][commands["b"].index("--rate") + 1] == "1.5"
