"""AdapterPool: names, generations and who uses them."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lora_factories import MODULES, SITES, holds, make_arena, make_weights

from motet.errors import AdapterExists, AdapterLoadError, AdapterNotFound
from motet.kernels.ops import select_ops
from motet.lora.adapter import AdapterRef, LoRAWeights
from motet.lora.arena import AdapterArena
from motet.lora.batch import LoRABatch
from motet.lora.pool import AdapterPool


def make_pool(capacity_bytes: int = 1 << 16) -> tuple[AdapterArena, AdapterPool]:
    arena = make_arena(capacity_bytes)
    return arena, AdapterPool(arena)


# --- behaviour, one at a time


def test_an_added_adapter_is_described_and_found_by_its_name() -> None:
    arena, pool = make_pool()
    weights = make_weights({"q": 3, "o": 5})
    info = pool.add("acme", weights, pin=True)
    assert (info.name, info.rank, info.bytes, info.digest) == (
        "acme",
        5,
        weights.nbytes,
        weights.digest.hex(),
    )
    assert (info.pinned, info.in_use, info.residency) == (True, 0, "device")
    ref = pool.acquire("acme")
    assert ref == AdapterRef("acme", info.generation, weights.digest)
    assert holds(arena, pool.slot(ref), weights)
    pool.add("abba", make_weights({"q": 1}))
    assert [(i.name, i.pinned, i.in_use) for i in pool.infos()] == [("abba", False, 0), ("acme", True, 1)]


def test_a_taken_name_is_refused_unless_it_is_to_be_replaced() -> None:
    arena, pool = make_pool()
    old = pool.add("acme", make_weights({"q": 1}))
    with pytest.raises(AdapterExists, match=r"'acme' is loaded.*replace=True"):
        pool.add("acme", make_weights({"q": 1}))
    weights = make_weights({"k": 2})
    new = pool.add("acme", weights, replace=True)
    assert new.generation > old.generation
    assert arena.used_bytes == weights.nbytes
    assert holds(arena, pool.slot(pool.acquire("acme")), weights)


def test_an_unknown_name_is_answered_with_those_that_are_loaded() -> None:
    _, pool = make_pool()
    for call in (pool.acquire, pool.remove):
        with pytest.raises(AdapterNotFound, match="'acme' is loaded, only nothing"):
            call("acme")
    pool.add("abba", make_weights({"q": 1}))
    with pytest.raises(AdapterNotFound, match="only 'abba'"):
        pool.acquire("acme")


@pytest.mark.parametrize("replace", [False, True])
def test_a_retired_generation_lives_until_its_last_request_ends(replace: bool) -> None:
    arena, pool = make_pool()
    weights, newer = make_weights({"q": 2}), make_weights({"q": 1})
    pool.add("acme", weights)
    refs = [pool.acquire("acme") for _ in range(3)]
    if replace:
        pool.add("acme", newer, replace=True)
        assert pool.acquire("acme") != refs[0]
    else:
        assert pool.remove("acme") == refs[0]
        with pytest.raises(AdapterNotFound):
            pool.acquire("acme")
    for ref in refs:
        assert holds(arena, pool.slot(ref), weights)
        pool.check_integrity()
        pool.release(ref)
    assert arena.used_bytes == (newer.nbytes if replace else 0)
    with pytest.raises(KeyError):
        pool.slot(refs[0])


def test_a_name_that_is_loaded_again_is_another_generation_though_the_weights_are_the_same() -> None:
    _, pool = make_pool()
    weights = make_weights({"q": 1})
    refs = []
    for _ in range(5):
        pool.add("acme", weights)
        refs.append(pool.acquire("acme"))
        pool.remove("acme")
    assert len({ref.generation for ref in refs}) == 5
    assert len({pool.slot(ref) for ref in refs}) == 5


def test_releasing_more_often_than_acquiring_is_caught() -> None:
    _, pool = make_pool()
    pool.add("acme", make_weights({"q": 1}))
    ref = pool.acquire("acme")
    pool.release(ref)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(ref)


def test_without_room_nothing_changes_not_even_what_was_to_be_replaced() -> None:
    arena, pool = make_pool(4 * 7 * 2)
    weights = make_weights({"q": 1})
    pool.add("acme", weights)
    before = pool.infos()
    with pytest.raises(AdapterLoadError, match="no room"):
        pool.add("acme", make_weights({"q": 2}), replace=True)
    assert pool.infos() == before
    assert holds(arena, pool.slot(pool.acquire("acme")), weights)
    pool.check_integrity()


class _Spied(dict[str, Any]):
    """Modules that call `look` whenever one of them is taken out."""

    def __init__(self, modules: Any, look: Callable[[], None]) -> None:
        super().__init__(modules)
        self.look = look

    def __getitem__(self, module: str) -> Any:
        self.look()
        return super().__getitem__(module)


@pytest.mark.timeout(20)  # a lock held would wait for ever
def test_while_weights_are_copied_the_pool_answers_and_does_not_know_them_yet() -> None:
    arena, pool = make_pool()
    pool.add("other", make_weights({"q": 1}))
    looks = []

    def look() -> None:
        pool.release(pool.acquire("other"))
        pool.check_integrity()
        with pytest.raises(AdapterNotFound):
            pool.acquire("acme")
        looks.append(1)

    weights = make_weights({"q": 2, "o": 2})
    pool.add("acme", LoRAWeights(weights.digest, _Spied(weights.modules, look)))
    assert looks
    assert holds(arena, pool.slot(pool.acquire("acme")), weights)


def test_of_two_racing_adds_of_one_name_one_wins_and_the_other_leaves_no_trace() -> None:
    arena, pool = make_pool()
    faster, slower = make_weights({"q": 1}), make_weights({"q": 2})

    def overtake() -> None:
        if not pool.infos():
            pool.add("acme", faster)

    with pytest.raises(AdapterExists):
        pool.add("acme", LoRAWeights(slower.digest, _Spied(slower.modules, overtake)))
    assert arena.used_bytes == faster.nbytes
    assert holds(arena, pool.slot(pool.acquire("acme")), faster)
    pool.check_integrity()


def test_the_bookkeeping_loads_no_torch() -> None:
    code = (
        "import sys, motet.lora.pool, motet.lora.adapter, motet.lora.sites; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- any order of calls


@dataclass
class Load:
    """What the machine knows of one successful `add`."""

    name: str
    weights: LoRAWeights
    refs: list[AdapterRef]


class PoolMachine(RuleBasedStateMachine):
    names = st.sampled_from("abcd")
    ranks = st.dictionaries(st.sampled_from(MODULES), st.integers(1, 6), min_size=1)

    @initialize(elements=st.integers(0, 600))
    def start(self, elements: int) -> None:
        self.arena, self.pool = make_pool(4 * elements)
        self.elements = elements
        self.loads: dict[int, Load] = {}  # by generation; alive or not
        self.current: dict[str, int] = {}

    @property
    def alive(self) -> dict[int, Load]:
        return {g: load for g, load in self.loads.items() if load.refs or self.current.get(load.name) == g}

    def gaps(self) -> list[int]:
        """Sizes of the free stretches between the adapters, from the tables that the ops read."""
        starts = []
        for generation, load in self.alive.items():
            slot = self.slot_of(generation)
            first = min(
                int(offset)
                for site in SITES
                for offset, rank in zip(*(t[slot] for t in self.arena.slices(site.index)[:3:2]), strict=False)
                if rank
            )
            starts.append((first, load.weights.nbytes // 4))
        gaps, end = [], 0
        for first, size in [*sorted(starts), (self.elements, 0)]:
            gaps.append(first - end)
            end = first + size
        return gaps

    def slot_of(self, generation: int) -> int:
        load = self.loads[generation]
        return self.pool.slot(AdapterRef(load.name, generation, load.weights.digest))

    @rule(name=names, ranks=ranks, replace=st.booleans(), pin=st.booleans())
    def add(self, name: str, ranks: dict[str, int], replace: bool, pin: bool) -> None:
        weights = make_weights(ranks)
        if name in self.current and not replace:
            with pytest.raises(AdapterExists):
                self.pool.add(name, weights)
            return
        gaps = self.gaps()
        try:
            info = self.pool.add(name, weights, replace=replace, pin=pin)
        except AdapterLoadError:
            assert max(gaps) < weights.nbytes // 4
            return
        assert max(gaps) >= weights.nbytes // 4
        assert info.generation not in self.loads
        assert (info.pinned, info.rank, info.bytes) == (pin, max(ranks.values()), weights.nbytes)
        self.loads[info.generation] = Load(name, weights, [])
        self.current[name] = info.generation

    @rule(name=names)
    def remove(self, name: str) -> None:
        if name in self.current:
            assert self.pool.remove(name).generation == self.current.pop(name)
        else:
            with pytest.raises(AdapterNotFound):
                self.pool.remove(name)

    @rule(name=names)
    def acquire(self, name: str) -> None:
        if name in self.current:
            ref = self.pool.acquire(name)
            assert ref.generation == self.current[name]
            self.loads[ref.generation].refs.append(ref)
        else:
            with pytest.raises(AdapterNotFound):
                self.pool.acquire(name)

    @precondition(lambda self: any(load.refs for load in self.loads.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        used = sorted(g for g, load in self.loads.items() if load.refs)
        self.pool.release(self.loads[data.draw(st.sampled_from(used))].refs.pop())

    @invariant()
    def free_and_held_make_the_capacity_and_all_alive_is_intact(self) -> None:
        self.pool.check_integrity()
        assert self.arena.used_bytes == sum(load.weights.nbytes for load in self.alive.values())
        assert self.arena.used_bytes <= self.arena.capacity_bytes
        for generation, load in self.alive.items():
            assert holds(self.arena, self.slot_of(generation), load.weights)
        assert {(i.name, i.generation, i.in_use) for i in self.pool.infos()} == {
            (name, g, len(self.loads[g].refs)) for name, g in self.current.items()
        }


class TestPool(PoolMachine.TestCase):  # type: ignore[misc]  # hypothesis makes the class
    settings = settings(max_examples=200, stateful_step_count=20, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestPoolLong(PoolMachine.TestCase):  # type: ignore[misc]  # hypothesis makes the class
    settings = settings(max_examples=2000, stateful_step_count=30, deadline=None)


# --- any order of calls on many threads


def race(seed: int, rounds: int) -> None:
    """Loaders add, replace and remove while two engines compute with what they acquired."""
    arena, pool = make_pool(4 * 25 * 40)
    ops = select_ops("cpu", "float32")
    names = [f"tenant{i}" for i in range(24)]
    expected: dict[bytes, float] = {}  # digest -> the delta of `o` for an x of ones
    failures: list[BaseException] = []

    def load(random: random.Random) -> None:
        for _ in range(rounds):
            name = random.choice(names)
            rank, value = random.randint(1, 4), random.randint(1, 9)
            weights = make_weights({"q": rank, "o": rank}, value=value)
            expected[weights.digest] = 5.0 * rank * value * value  # small integers: exact in float32
            with contextlib.suppress(AdapterExists, AdapterLoadError):
                pool.add(name, weights, replace=random.random() < 0.7)
            if random.random() < 0.3:
                with contextlib.suppress(AdapterNotFound):
                    pool.remove(random.choice(names))

    def serve(random: random.Random) -> None:
        refs: list[AdapterRef] = []
        while (loading := any(loader.is_alive() for loader in loaders)) or refs:
            while loading and len(refs) < 12:
                try:
                    refs.append(pool.acquire(random.choice(names)))
                except AdapterNotFound:
                    break
            batch = LoRABatch(arena, [-1, *(pool.slot(ref) for ref in refs)])
            out = torch.zeros(len(refs) + 1, 3)
            batch.add_delta(ops, SITES[1], torch.ones(len(refs) + 1, 5), out)
            assert out.tolist() == [[0.0] * 3, *([expected[ref.digest]] * 3 for ref in refs)]
            random.shuffle(refs)
            for _ in range(random.randint(0, len(refs))):
                pool.release(refs.pop())
            pool.check_integrity()

    def guarded(work: Callable[[random.Random], None], seed: int) -> None:
        try:
            work(random.Random(seed))
        except BaseException as error:
            failures.append(error)

    def thread(work: Callable[[random.Random], None], number: int) -> threading.Thread:
        return threading.Thread(target=guarded, args=(work, 10 * seed + number))

    loaders = [thread(load, 0), thread(load, 1)]
    threads = [*loaders, thread(serve, 2), thread(serve, 3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures
    for info in pool.infos():
        assert info.in_use == 0
        pool.remove(info.name)
    pool.check_integrity()
    assert arena.used_bytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_load_unload_and_compute_at_once_keep_their_weights(seed: int) -> None:
    race(seed, rounds=150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 30))
def test_threads_that_load_unload_and_compute_at_once_for_long_keep_their_weights(seed: int) -> None:
    race(seed, rounds=1000)
