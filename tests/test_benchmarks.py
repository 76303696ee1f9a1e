"""The arithmetic of the benchmarks: percentiles, medians, verdicts, arrivals."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from benchmarks.common import Request, Timing, percentile, single_figures
from benchmarks.drive import over_time
from benchmarks.ratios import Floor, Measurements, table_of_figures
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
        for speed, wait in rounds:
            measurements.add({"engine": engine, "test": "w2", "tokens_per_s": speed, "ttft_ms": wait})
    return measurements


def test_ours_is_held_against_the_best_of_the_others_by_medians_of_rounds() -> None:
    those = measured(motet=[(99, 9), (30, 40), (33, 41)], slow=[(10, 99)], fast=[(20, 90), (22, 90)])
    assert SPEED.verdict(those) == "| speed | 33 | 21 fast | 1.57 | ≥ 1.5 | yes |"
    assert WAIT.verdict(those) == "| wait | 40 | 90 fast | 0.44 | ≤ 0.5 | yes |"


def test_what_is_not_reached_or_not_measured_is_said() -> None:
    assert "| **no** (without slow) |" in SPEED.verdict(measured(motet=[(20, 50)], fast=[(20, 90)]))
    assert "| **no** |" in WAIT.verdict(measured(motet=[(20, 50)], slow=[(10, 99)], fast=[(20, 90)]))
    assert "not measured" in SPEED.verdict(measured(motet=[(20, 50)]))
    assert "not measured" in SPEED.verdict(measured(fast=[(20, 50)]))


def test_the_table_has_a_row_for_each_engine_and_gaps_where_it_has_no_figure() -> None:
    table = table_of_figures(measured(motet=[(1234, 40)], slow=[(10, 99)]))
    assert "| motet | 1,234 |" in table
    assert "| slow | 10 |  |" in table


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
