"""Steps that the library computes beside Python: in order, each on what the one before has chosen."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from weakref import ReferenceType as Ref
from weakref import ref

import psutil
import pytest
import torch
from torch import Tensor

from motet.kernels.cpu.ops import CpuOps
from tests.kernels.cpu.conftest import MakeOps, Network

VOCAB = 50


def make_network(ops: CpuOps) -> Network:
    """Slow enough that a step is under way while others come."""
    return Network(ops, vocab=VOCAB, hidden=256, columns=VOCAB)


@pytest.fixture
def network(make_ops: MakeOps) -> Network:
    return make_network(make_ops())


def test_steps_run_behind_each_other_each_on_the_tokens_of_the_one_before(network: Network) -> None:
    ops = network.ops
    with torch.inference_mode():
        sampled = torch.tensor([3, 1, 4])
        expected = []
        for _ in range(40):
            sampled = ops.greedy(network(sampled.roll(1)))[0]
            expected.append(sampled)
        assert len({tuple(ids.tolist()) for ids in expected}) > 5, "it does not stand still"

        replay = ops.record(lambda: network(sampled), [sampled])
        assert replay is not None
        sampled, source = torch.tensor([3, 1, 4]), torch.tensor([2, 0, 1])
        started = []
        for _ in range(40):

            def step(before: Tensor = sampled) -> Tensor:
                ids = torch.full((3,), -1)
                ops.fill_sampled(ids, before, source)
                return ops.greedy(replay([ids]))[0]

            sampled, wait = ops.start(step)
            started.append((sampled, wait))
        for (ids, wait), of_one in zip(started, expected, strict=True):
            wait()
            assert torch.equal(ids, of_one)
        wait()
    assert not ops._queued, "nothing is kept that has run"


def test_what_a_step_names_is_kept_until_it_has_run(make_ops: MakeOps) -> None:
    def start() -> tuple[Tensor, Callable[[], None], Ref[Network]]:
        network = make_network(make_ops())
        ids = torch.arange(3)
        replay = network.ops.record(lambda: network(ids), [ids])
        assert replay is not None

        def step() -> Tensor:
            assert network is not None, "it names the weights"
            return replay([torch.arange(3)])

        for _ in range(50):
            result, wait = network.ops.start(step)
        return result, wait, ref(network)

    with torch.inference_mode():
        result, wait, network = start()
        gc.collect()
        wait()
        expected = result.clone()
        del wait, result
        gc.collect()
        assert network() is None
    assert torch.equal(make_network(make_ops())(torch.arange(3)), expected)


def test_steps_that_nobody_waits_for_end_with_the_backend(make_ops: MakeOps) -> None:
    def start() -> None:
        network = make_network(make_ops())
        ids = torch.arange(3)
        replay = network.ops.record(lambda: network(ids), [ids])
        assert replay is not None
        for _ in range(50):
            network.ops.start(lambda: (network, replay([torch.arange(3)])))

    gc.collect()  # other tests' backends
    before = psutil.Process().num_threads()
    with torch.inference_mode():
        start()
    gc.collect()
    assert psutil.Process().num_threads() == before


def test_a_step_that_fails_leaves_nothing_behind(network: Network) -> None:
    ops = network.ops

    def step() -> Tensor:
        ops.greedy(torch.zeros(3, VOCAB))
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        ops.start(step)
    assert not ops._queued
    assert ops.greedy(torch.eye(4))[0].tolist() == [0, 1, 2, 3]


def test_other_threads_may_call_ops_while_steps_run(network: Network) -> None:
    ops = network.ops
    x = torch.randn(5, 256)
    weight = ops.pack_linear(torch.randn(640, 256))
    expected = ops.linear(x, weight)
    ids = torch.arange(3)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(i for i in range(400) if not torch.equal(ops.linear(x, weight), expected))

    with torch.inference_mode():
        logits = network(ids).clone()
        replay = ops.record(lambda: network(ids), [ids])
        assert replay is not None
        callers = [threading.Thread(target=call) for _ in range(2)]
        for caller in callers:
            caller.start()
        while any(caller.is_alive() for caller in callers):
            result, wait = ops.start(lambda: replay([torch.arange(3)]))
            wait()
            assert torch.equal(result, logits)
    assert wrong == []
