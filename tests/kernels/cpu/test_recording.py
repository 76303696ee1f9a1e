"""Recorded steps: what a replay computes, where its tensors lie, and what cannot be recorded."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet.kernels.cpu.ops import CpuOps
from motet.kernels.cpu.recording import _lay_out
from tests.kernels.cpu.conftest import MakeOps, Network


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ops(make_ops: MakeOps) -> CpuOps:
    return make_ops()


def test_a_replay_computes_the_step_on_other_inputs(ops: CpuOps) -> None:
    network = Network(ops)
    with torch.inference_mode():
        ids = torch.tensor([3, 1, 4])
        replay = ops.record(lambda: network(ids), [ids])
        assert replay is not None
        for seed in range(5):
            others = torch.randint(0, 50, (3,), generator=torch.Generator().manual_seed(seed))
            assert torch.equal(replay([others]), network(others))


def test_replays_of_different_shapes_share_one_arena_and_stay_right_when_it_grows(ops: CpuOps) -> None:
    network = Network(ops)
    with torch.inference_mode():
        replays = {}
        for rows in (1, 2, 40):
            ids = torch.arange(rows)
            replays[rows] = ops.record(lambda ids=ids: network(ids), [ids])
        for rows in (40, 1, 2, 1):
            ids = torch.arange(rows) + 5
            replay = replays[rows]
            assert replay is not None
            assert torch.equal(replay([ids]), network(ids))


def test_a_step_that_returns_no_row_is_replayed_too(ops: CpuOps) -> None:
    network = Network(ops)
    ids = torch.arange(0)
    with torch.inference_mode():
        replay = ops.record(lambda: network(ids), [ids])
        assert replay is not None
        assert replay([ids]).shape == (0, 7)


def test_recording_computes_nothing(ops: CpuOps) -> None:
    x, residual, last = random(3, 4), torch.zeros(3, 4), torch.tensor([2])

    def step() -> Tensor:
        ops.add_residual(x, residual)
        return ops.take_rows(residual, last)

    replay = ops.record(step, [x, residual])
    assert replay is not None
    assert not residual.any()
    assert torch.equal(replay([x, residual]), x[2:])


def test_recording_imports_nothing() -> None:
    code = """
import sys, torch
from motet.kernels.cpu.library import open_library
from motet.kernels.cpu.ops import CpuOps
ops = CpuOps(*open_library(), torch.float32, 1)
before = set(sys.modules)
assert ops.record(lambda: ops.zeros_like(torch.empty(2)), []) is not None
print(*set(sys.modules) - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [], "while requests are served, that would take a second"


def test_a_step_that_torch_computes_in_part_is_not_recorded(
    ops: CpuOps, caplog: pytest.LogCaptureFixture
) -> None:
    network = Network(ops)
    ids = torch.arange(3)
    with torch.inference_mode(), caplog.at_level("INFO", "motet"):
        assert ops.record(lambda: network(ids) * 2, [ids]) is None
    assert "aten.mul" in caplog.text
    assert network(ids).shape == (3, 7), "the backend is of use afterwards"


def test_what_a_step_makes_of_pythons_numbers_stays_for_its_replays(ops: CpuOps) -> None:
    x = random(10, 4)
    replay = ops.record(lambda: ops.take_rows(x, torch.tensor([3, 1, 2])), [x])
    assert replay is not None
    others = [torch.full((3,), 7) for _ in range(100)]  # they would lie where it lay
    assert torch.equal(replay([x]), x[[3, 1, 2]])
    del others


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy])
def test_a_step_in_which_python_reads_a_tensor_is_not_recorded(ops: CpuOps, read) -> None:
    rows = torch.tensor([2, 0])
    x = random(3, 4)
    assert ops.record(lambda: ops.take_rows(x, torch.tensor([int(i) for i in read(rows)])), [rows]) is None


def test_a_step_that_returns_what_it_did_not_make_is_not_recorded(ops: CpuOps) -> None:
    x = random(3, 4)
    assert ops.record(lambda: x[:2], []) is None


def test_an_error_in_a_step_leaves_no_recording_behind(ops: CpuOps) -> None:
    def step() -> Tensor:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        ops.record(step, [])
    ids = torch.arange(3)
    assert ops.record(lambda: Network(ops)(ids), [ids]) is None, "packing is no part of a step"
    network = Network(ops)
    with torch.inference_mode():
        assert ops.record(lambda: network(ids), [ids]) is not None


def test_what_other_threads_compute_meanwhile_is_no_part_of_the_step(ops: CpuOps) -> None:
    network = Network(ops)
    ids = torch.arange(3)
    elsewhere = torch.zeros(4)

    def step() -> Tensor:
        loader = threading.Thread(target=lambda: ops.add_residual(torch.ones(1, 4), elsewhere))
        loader.start()
        loader.join()
        return network(ids)

    with torch.inference_mode():
        replay = ops.record(step, [ids])
        assert replay is not None
        assert torch.equal(replay([ids + 1]), network(ids + 1))
    assert elsewhere.tolist() == [1.0] * 4, "done once"


lifetimes = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 300)), max_size=25)


@settings(max_examples=200)
@given(lifetimes)
def test_tensors_that_live_at_once_never_overlap(spans: list[tuple[int, int, int]]) -> None:
    lives = {i: (first, first + length) for i, (first, length, _) in enumerate(spans)}
    sizes = [size for _, _, size in spans]
    starts, total = _lay_out(lives, sizes)
    for i, (first, last) in lives.items():
        assert starts[i] % 64 == 0
        assert starts[i] + sizes[i] <= total
        for j in range(i):
            apart = starts[i] + sizes[i] <= starts[j] or starts[j] + sizes[j] <= starts[i]
            assert apart or lives[j][1] < first or last < lives[j][0]
