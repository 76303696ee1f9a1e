"""The library's own threads: they share work out without losing or repeating any, and they end."""

from __future__ import annotations

import gc
import os
import threading
import time

import psutil
import pytest
import torch

from tests.kernels.cpu.conftest import MakeOps


def test_threads_end_with_the_backend(make_ops: MakeOps) -> None:
    process = psutil.Process()
    gc.collect()  # other tests' backends
    before = process.num_threads()
    ops = make_ops(threads=4)
    assert process.num_threads() == before + 4, "the caller is one of the four; the queue is another caller"
    del ops
    gc.collect()
    assert process.num_threads() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_lets_the_backend_go_without_waiting_for_threads_that_it_has_not(
    make_ops: MakeOps,
) -> None:
    ops = make_ops(threads=2)
    child = os.fork()
    if child == 0:
        del ops  # its end is the child's too: of the object, at the latest at the interpreter's exit
        os._exit(0)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0), "it hangs"


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_part_is_done_once_however_many_threads_there_are(make_ops: MakeOps, threads: int) -> None:
    ops = make_ops(threads=threads)
    weight = torch.arange(640.0 * 3).view(640, 3)  # twenty panels of little work: threads meet all the time
    packed = ops.pack_linear(weight)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    expected = x @ weight.T
    for _ in range(3000):
        assert torch.equal(ops.linear(x, packed), expected)


def test_backends_on_threads_of_their_own_do_not_disturb_each_other(make_ops: MakeOps) -> None:
    weight = torch.randn(640, 64)
    x = torch.randn(5, 64)
    expected = make_ops(threads=1)
    reference = expected.linear(x, expected.pack_linear(weight))
    wrong: list[int] = []

    def work() -> None:
        ops = make_ops(threads=3)
        packed = ops.pack_linear(weight)
        wrong.extend(i for i in range(300) if not torch.equal(ops.linear(x, packed), reference))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
