"""AdapterPool under any order of calls, with other calls between the steps of each of its jobs."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lora_factories import MODULES, Disk, holds, make_weights

from motet.errors import AdapterError, AdapterExists, AdapterLoadError, AdapterNotFound
from motet.lora.adapter import LoRAWeights
from motet.lora.generation import AdapterInfo, AdapterLease, Bring, Generation, Read
from strategies import FEW, MANY

NAMES = st.sampled_from("abcd")


@dataclass
class Load:
    name: str
    replace: bool
    pin: bool
    future: Future[AdapterInfo]


class PoolMachine(RuleBasedStateMachine):
    @initialize(elements=st.integers(0, 160), host=st.sampled_from([0, 40, 200]), resolving=st.booleans())
    def start(self, elements: int, host: int, resolving: bool) -> None:
        self.resolving = resolving
        self.disk = Disk(4 * elements, 4 * host, resolving=resolving)
        self.pool, self.arena = self.disk.pool, self.disk.arena
        self.by_digest: dict[bytes, LoRAWeights] = {}
        self.num_folders = 0
        self.loads: list[Load] = []
        self.leases: list[AdapterLease] = []
        self.futures: dict[AdapterLease, Future[None] | None] = {}
        self.job: Read | Bring | None = None
        self.to_evict: list[Generation] = []
        self.waits_since: dict[Generation, int] = {}
        self.tick = 0

    def new_weights(self, ranks: dict[str, int]) -> LoRAWeights:
        weights = make_weights(ranks)
        self.by_digest[weights.digest] = weights
        return weights

    def new_folder(self, ranks: dict[str, int]):
        self.num_folders += 1
        return self.disk.save(f"folder {self.num_folders}", self.new_weights(ranks))

    # -- users -------------------------------------------------------------------------------------------

    ranks = st.dictionaries(st.sampled_from(MODULES), st.integers(1, 4), min_size=1)

    @rule(name=NAMES, ranks=ranks, replace=st.booleans(), pin=st.sampled_from([False, False, True]))
    def load(self, name: str, ranks: dict[str, int], replace: bool, pin: bool) -> None:
        taken = name in {info.name for info in self.pool.infos()}
        try:
            future = self.pool.load(name, self.new_folder(ranks), pin=pin, replace=replace)
        except AdapterExists:
            assert taken and not replace
        else:
            assert replace or not taken
            self.loads.append(Load(name, replace, pin, future))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.loads)).future.cancel()

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        infos = {info.name: info for info in self.pool.infos()}
        if name in infos:
            assert self.pool.remove(name).generation == infos[name].generation
        else:
            with pytest.raises(AdapterNotFound):
                self.pool.remove(name)

    @rule(name=NAMES)
    def acquire(self, name: str) -> None:
        infos = {info.name: info for info in self.pool.infos()}
        if name not in infos and not self.resolving:
            with pytest.raises(AdapterNotFound):
                self.pool.acquire(name)
            return
        lease = self.pool.acquire(name)
        if name in infos:
            assert lease.ref is not None and lease.ref.generation == infos[name].generation
        self.take(lease)

    def take(self, lease: AdapterLease) -> None:
        assert (lease.slot >= 0) == (lease.ready is None)
        self.leases.append(lease)
        self.futures[lease] = lease.ready

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.pool.release(lease)

    # -- the world outside -------------------------------------------------------------------------------

    @precondition(lambda self: self.disk.folders)
    @rule(data=st.data(), ranks=ranks, gone=st.booleans())
    def spoil_a_folder(self, data: st.DataObject, ranks: dict[str, int], gone: bool) -> None:
        source = data.draw(st.sampled_from(sorted(self.disk.folders)))
        if gone:
            del self.disk.folders[source]
        else:
            self.disk.folders[source] = self.new_weights(ranks)

    @precondition(lambda self: not self.pool.unresolved.empty())
    @rule(ranks=ranks, answer=st.sampled_from(["found", "found", "unknown"]))
    def resolve(self, ranks: dict[str, int], answer: str) -> None:
        generation = self.pool.unresolved.get()
        assert generation is not None
        if not self.pool.is_sought(generation):
            assert not generation.waiting
        elif answer == "found":
            self.pool.resolved(generation, self.new_folder(ranks))
        else:
            self.pool.not_resolved(generation, AdapterNotFound("unknown"))

    # -- the loader, step by step --------------------------------------------------------------------------

    @precondition(lambda self: self.job is None)
    @rule()
    def begin_a_job(self) -> None:
        self.job = self.pool.next_job()
        self.to_evict = list(self.job.victims) if isinstance(self.job, Bring) else []
        if self.job is None:
            self.check_that_nothing_could_be_done()
        elif isinstance(self.job, Bring):
            self.check_that_it_is_its_turn(self.job)

    @precondition(lambda self: self.to_evict)
    @rule()
    def evict(self) -> None:
        self.disk.evict(self.to_evict.pop(0))

    @precondition(lambda self: self.job is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def end_the_job(self, fails: bool) -> None:
        job, self.job = self.job, None
        assert job is not None
        if fails:
            self.pool.failed(job, AdapterLoadError("a disk error"))
        else:
            if isinstance(job, Bring):  # those of its victims that are still there
                job = Bring(job.generation, tuple(self.to_evict), job.is_reload)
            self.disk.do(job)
        self.to_evict = []

    # -- what must hold ------------------------------------------------------------------------------------

    def check_that_nothing_could_be_done(self) -> None:
        """Who still waits lacks room that others use, or an answer of the resolver; pinned loads alike."""
        waiting = [g for g in self.waits_since if g.waiting and g.ref is not None]
        for lease in self.leases:
            assert lease.slot < 0 or lease.generation.holds
        if waiting:
            first = min(waiting, key=lambda g: self.waits_since[g])
            idle = [g.slot for g in self.placed() if not g.holds and not g.pinned]
            pinned_first = [load for load in self.loads if load.pin and not load.future.done()]
            if not pinned_first:
                assert not first.is_placed or any(g.holds for g in self.placed())
                if not first.is_placed:
                    assert not self.arena.fits(first.nbytes, idle), "there is room for whoever waits longest"
        for load in self.loads:
            assert load.future.done() or load.pin or waiting, "a load that needs no room is done"

    def check_that_it_is_its_turn(self, job: Bring) -> None:
        """Of the adapters that requests wait for, none that came before it is still away."""
        assert all(not victim.holds and not victim.pinned for victim in job.victims)
        if job.generation.waiting:
            since = self.waits_since[job.generation]
            overtaken = [
                g for g, other in self.waits_since.items() if g.waiting and not g.is_placed and other < since
            ]
            assert not [g for g in overtaken if g is not job.generation and g.slot < 0 and not g.busy]

    def placed(self) -> set[Generation]:
        return {g for g in self.pool._tiers.live if g.slot >= 0}

    @invariant()
    def all_that_is_held_is_intact_and_in_its_place(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.arena.used_bytes <= self.arena.capacity_bytes
        for lease in self.leases:
            ready = self.futures[lease]
            assert ready is None or ready.done() == (lease.slot >= 0 or ready.done())
            if lease.slot >= 0:
                assert lease.slot == lease.generation.slot
                assert ready is None or ready.result(0) is None
            elif ready is not None and ready.done():
                assert isinstance(ready.exception(0), AdapterError)
        for generation in {lease.generation for lease in self.leases if lease.slot >= 0}:
            assert generation.ref is not None
            assert holds(self.arena, generation.slot, self.by_digest[generation.ref.digest])
        for info in self.pool.infos():
            mine = [
                lease
                for lease in self.leases
                if lease.ref is not None
                and lease.ref.generation == info.generation
                and not self.was_refused(lease)
            ]
            assert info.in_use == len(mine)
            assert not info.pinned or info.residency == "device"
        self.tick += 1
        waiting = {g for g in self.pool._wanted if g.waiting}
        self.waits_since = {g: self.waits_since.get(g, self.tick) for g in waiting}

    def was_refused(self, lease: AdapterLease) -> bool:
        ready = self.futures[lease]
        return ready is not None and ready.done() and ready.exception(0) is not None

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        if self.job is not None:
            self.end_the_job(fails=False)
        while not self.pool.unresolved.empty():
            self.resolve({"q": 1}, "found")
        while self.leases:
            self.disk.run_jobs()
            assert any(lease.slot >= 0 or self.was_refused(lease) for lease in self.leases), "a deadlock"
            for lease in [lease for lease in self.leases if lease.slot >= 0 or self.was_refused(lease)]:
                self.leases.remove(lease)
                self.pool.release(lease)
        self.disk.run_jobs()
        assert all(load.future.done() for load in self.loads)
        for info in self.pool.infos():
            assert info.in_use == 0
            self.pool.remove(info.name)
        self.disk.run_jobs()
        self.pool.check_integrity()
        assert self.arena.used_bytes == 0
        assert not self.pool._tiers.live and not self.pool._names._sought and not self.pool._answers.promised


@pytest.mark.parametrize(
    "examples",
    [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
    ids=["few", "many"],
)
def test_any_history_leaves_each_its_weights_and_nobody_waiting(examples: settings) -> None:
    run_state_machine_as_test(PoolMachine, settings=examples)
