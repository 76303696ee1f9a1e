"""AdapterPool: names, generations, who uses them, and which of them are where."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lora_factories import Disk, holds, make_weights, num_bytes

from motet.errors import AdapterExists, AdapterLoadError, AdapterNotFound, EngineClosed
from motet.lora.adapter import AdapterRef, LoRAWeights
from motet.lora.generation import AdapterLease, Bring, Read

ONE = 4 * 7
"""Bytes of an adapter of rank 1 on `q`."""


def small() -> LoRAWeights:
    return make_weights({"q": 1})


# --- names and generations


def test_a_loaded_adapter_is_described_and_found_by_its_name() -> None:
    disk = Disk()
    weights = make_weights({"q": 3, "o": 5})
    info = disk.load("acme", weights, pin=True)
    assert (info.name, info.rank, info.bytes, info.digest) == (
        "acme",
        5,
        num_bytes(weights),
        weights.digest.hex(),
    )
    assert (info.pinned, info.in_use, info.residency) == (True, 0, "device")
    lease = disk.pool.acquire("acme")
    assert (lease.name, lease.ref) == ("acme", AdapterRef("acme", info.generation, weights.digest))
    assert lease.ready is None
    assert holds(disk.arena, lease.slot, weights)
    disk.load("abba", small())
    assert [(i.name, i.pinned, i.in_use) for i in disk.pool.infos()] == [
        ("abba", False, 0),
        ("acme", True, 1),
    ]


def test_a_taken_name_is_refused_unless_it_is_to_be_replaced() -> None:
    disk = Disk()
    old = disk.load("acme", small())
    with pytest.raises(AdapterExists, match=r"'acme' is loaded.*replace=True"):
        disk.ask("acme", small())
    weights = make_weights({"k": 2})
    new = disk.load("acme", weights, replace=True)
    assert new.generation > old.generation
    assert disk.arena.used_bytes == num_bytes(weights)
    assert holds(disk.arena, disk.pool.acquire("acme").slot, weights)


def test_an_unknown_name_is_answered_with_those_that_are_loaded() -> None:
    disk = Disk()
    for call in (disk.pool.acquire, disk.pool.remove):
        with pytest.raises(
            AdapterNotFound, match="'acme' is loaded, nor any other; load it with `load_adapter`"
        ):
            call("acme")
    disk.load("abba", small())
    with pytest.raises(AdapterNotFound, match="only 'abba'"):
        disk.pool.acquire("acme")


@pytest.mark.parametrize("replace", [False, True])
def test_a_retired_generation_lives_until_its_last_request_ends(replace: bool) -> None:
    disk = Disk()
    weights, newer = make_weights({"q": 2}), small()
    disk.load("acme", weights)
    leases = [disk.pool.acquire("acme") for _ in range(3)]
    if replace:
        disk.load("acme", newer, replace=True)
        assert disk.pool.acquire("acme").ref != leases[0].ref
    else:
        assert disk.pool.remove("acme") == leases[0].ref
        with pytest.raises(AdapterNotFound):
            disk.pool.acquire("acme")
    for lease in leases:
        assert holds(disk.arena, lease.slot, weights)
        disk.pool.check_integrity()
        disk.pool.release(lease)
    assert disk.arena.used_bytes == (num_bytes(newer) if replace else 0)


def test_a_name_that_is_loaded_again_is_another_generation_though_the_weights_are_the_same() -> None:
    disk = Disk()
    weights = small()
    leases = []
    for _ in range(5):
        disk.load("acme", weights)
        leases.append(disk.pool.acquire("acme"))
        disk.pool.remove("acme")
    assert len({lease.ref.generation for lease in leases}) == 5
    assert len({lease.slot for lease in leases}) == 5


def test_releasing_more_often_than_acquiring_is_caught() -> None:
    disk = Disk()
    disk.load("acme", small())
    lease = disk.pool.acquire("acme")
    disk.pool.release(lease)
    with pytest.raises(AssertionError, match="more often"):
        disk.pool.release(lease)


def test_the_bookkeeping_loads_no_torch() -> None:
    code = (
        "import sys, motet.lora.pool, motet.lora.adapter, motet.lora.sites; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- loads


def test_case_12_fifty_loads_of_one_name_read_once_and_one_of_them_wins() -> None:
    disk = Disk()
    weights = small()
    futures = [disk.ask("acme", weights) for _ in range(50)]
    disk.run_jobs()
    assert disk.num_reads == 1
    assert futures[0].result(0).generation == 1
    for future in futures[1:]:
        with pytest.raises(AdapterExists):
            future.result(0)


def test_case_12_fifty_loads_of_one_broken_folder_read_once_and_each_has_an_error_of_its_own() -> None:
    disk = Disk()
    futures = [disk.ask("acme", small()) for _ in range(50)]
    disk.folders.clear()
    disk.run_jobs()
    errors = [future.exception(0) for future in futures]
    assert disk.num_reads == 1
    assert all(isinstance(error, AdapterLoadError) for error in errors)
    assert len(set(map(id, errors))) == 50
    disk.load("acme", small())


def test_replacing_loads_of_one_name_follow_each_other() -> None:
    disk = Disk()
    generations = [make_weights({"q": 1}) for _ in range(3)]
    futures = []
    for number, weights in enumerate(generations):
        futures.append(disk.pool.load("acme", disk.save(f"v{number}", weights), replace=True))
    disk.run_jobs()
    assert [future.result(0).generation for future in futures] == [1, 2, 3]
    assert holds(disk.arena, disk.pool.acquire("acme").slot, generations[-1])


def test_a_load_that_is_cancelled_before_it_was_read_leaves_nothing() -> None:
    disk = Disk()
    queued, reading = disk.ask("queued", small()), None
    assert queued.cancel()
    disk.run_jobs()
    assert disk.num_reads == 0
    reading = disk.ask("reading", small())
    job = disk.pool.next_job()
    assert isinstance(job, Read)
    reading.cancel()
    disk.do(job)
    disk.run_jobs()
    assert (disk.pool.infos(), disk.arena.used_bytes) == ([], 0)


def test_a_closed_pool_refuses_who_waits_and_who_comes() -> None:
    disk = Disk()
    reading, queued = disk.ask("reading", small()), disk.ask("queued", small())
    job = disk.pool.next_job()
    disk.pool.close(lambda: EngineClosed("closed"))
    for future in (reading, queued):
        with pytest.raises(EngineClosed):
            future.result(0)
    assert job is not None
    disk.do(job)
    assert disk.pool.next_job() is None
    with pytest.raises(EngineClosed):
        disk.ask("late", small())


# --- room


def test_more_adapters_than_the_device_holds_are_all_loaded() -> None:
    disk = Disk(capacity_bytes=2 * ONE, host_bytes=3 * ONE)
    weights = {f"a{i}": small() for i in range(8)}
    for name in weights:
        assert disk.load(name, weights[name]).residency == "device"
    assert list(disk.residency().values()) == ["disk"] * 3 + ["host"] * 3 + ["device"] * 2
    for name in weights:
        lease = disk.pool.acquire(name)
        assert lease.slot == -1 and lease.ready is not None
        disk.run_jobs()
        lease.ready.result(0)
        assert holds(disk.arena, lease.slot, weights[name])
        disk.pool.release(lease)
    assert disk.pool.loads == 8 and disk.pool.reloads == 8 and disk.pool.evictions == 14
    assert disk.num_reads > 8


def test_the_least_recently_used_leaves_first() -> None:
    disk = Disk(capacity_bytes=3 * ONE)
    for name in "abc":
        disk.load(name, small())
    disk.pool.release(disk.pool.acquire("a"))
    disk.load("d", small())
    assert disk.residency() == {"a": "device", "b": "host", "c": "device", "d": "device"}


def test_a_large_one_sends_away_as_many_as_it_takes_and_no_more() -> None:
    disk = Disk(capacity_bytes=4 * ONE)
    for name in "abcd":
        disk.load(name, small())
    disk.load("large", make_weights({"q": 2}))
    assert disk.residency() == {"a": "host", "b": "host", "c": "device", "d": "device", "large": "device"}


def test_without_host_memory_idle_adapters_are_on_disk() -> None:
    disk = Disk(capacity_bytes=ONE, host_bytes=0)
    weights = small()
    disk.load("a", weights)
    disk.load("b", small())
    assert disk.residency() == {"a": "disk", "b": "device"}
    assert holds(disk.arena, wait(disk, "a").slot, weights)


def test_a_load_waits_for_no_room_and_a_request_does() -> None:
    disk = Disk(capacity_bytes=ONE)
    disk.load("a", small())
    user = disk.pool.acquire("a")
    weights = small()
    assert disk.load("b", weights).residency == "host"
    lease = disk.pool.acquire("b")
    disk.run_jobs()
    assert not lease.ready.done()
    disk.pool.release(user)
    disk.run_jobs()
    assert lease.ready.done() and holds(disk.arena, lease.slot, weights)


def test_first_come_first_served_and_those_that_make_way_take_nobody_new() -> None:
    disk = Disk(capacity_bytes=ONE)
    for name in "abc":
        disk.load(name, small())
    first = wait(disk, "a")
    second = disk.pool.acquire("b")
    disk.run_jobs()
    third, again = disk.pool.acquire("c"), disk.pool.acquire("a")
    disk.run_jobs()
    assert [lease.slot for lease in (second, third, again)] == [-1, -1, -1], "a newcomer would starve b"
    arrived = []
    for lease, name in ((first, "b"), (second, "c"), (third, "a")):
        disk.pool.release(lease)
        disk.run_jobs()
        arrived.append([info.name for info in disk.pool.infos() if info.residency == "device"])
        assert arrived[-1] == [name]
    disk.pool.release(again)


def test_an_adapter_that_need_not_make_way_any_more_is_open_again() -> None:
    disk = Disk(capacity_bytes=ONE)
    disk.load("a", small())
    disk.load("b", small())
    user = wait(disk, "a")
    waiting = disk.pool.acquire("b")
    disk.run_jobs()
    late = disk.pool.acquire("a")
    disk.pool.release(waiting)  # aborted
    disk.run_jobs()
    assert late.slot == user.slot
    assert disk.pool.acquire("a").ready is None


def test_a_waiting_request_that_ends_leaves_no_trace() -> None:
    disk = Disk(capacity_bytes=ONE)
    disk.load("a", small())
    disk.load("b", small())
    user = wait(disk, "a")
    waiting = disk.pool.acquire("b")
    disk.run_jobs()
    disk.pool.release(waiting)
    disk.pool.release(user)
    disk.run_jobs()
    assert disk.residency() == {"a": "device", "b": "host"}
    assert all(info.in_use == 0 for info in disk.pool.infos())


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_an_adapter_unloaded_while_a_request_waits_for_it_still_serves_that(when: str) -> None:
    disk = Disk(capacity_bytes=ONE)
    disk.load("a", small())
    weights = small()
    disk.load("b", weights)
    user = wait(disk, "a")
    lease = disk.pool.acquire("b")
    disk.run_jobs()
    if when == "waiting":
        disk.pool.remove("b")
        disk.pool.release(user)
    else:
        disk.pool.release(user)
        job = disk.pool.next_job()
        disk.pool.remove("b")
        disk.do(job)
    disk.run_jobs()
    assert holds(disk.arena, lease.slot, weights)
    disk.pool.release(lease)
    disk.pool.check_integrity()
    disk.run_jobs()
    assert disk.residency() == {"a": "host"} and disk.arena.used_bytes == 0


def test_an_adapter_unloaded_and_given_up_while_it_moves_leaves_no_trace() -> None:
    disk = Disk(capacity_bytes=ONE)
    disk.load("a", small())
    disk.load("b", small())
    lease = disk.pool.acquire("a")
    job = disk.pool.next_job()
    assert isinstance(job, Bring)
    for name in "ab":  # the one that comes and the one that goes
        disk.pool.remove(name)
    disk.pool.release(lease)
    disk.do(job)
    disk.run_jobs()
    disk.pool.check_integrity()
    assert (disk.arena.used_bytes, disk.pool.infos()) == (0, [])


@pytest.mark.parametrize("host_bytes", [0, 1 << 16])
def test_a_folder_that_changed_is_an_error_for_those_who_wait_and_for_nobody_else(host_bytes: int) -> None:
    disk = Disk(capacity_bytes=ONE, host_bytes=host_bytes)
    weights = small()
    disk.load("a", weights)
    disk.load("b", small())
    disk.save("a", small())
    lease = disk.pool.acquire("a")
    disk.run_jobs()
    if host_bytes:
        lease.ready.result(0)
        return
    with pytest.raises(AdapterLoadError, match="changed"):
        lease.ready.result(0)
    disk.pool.release(lease)
    assert disk.residency() == {"a": "disk", "b": "device"}, "nobody has left for what did not come"
    disk.save("a", weights)
    assert holds(disk.arena, wait(disk, "a").slot, weights)


# --- pins


def test_a_pinned_adapter_stays_until_it_is_unloaded_or_loaded_again_without() -> None:
    disk = Disk(capacity_bytes=2 * ONE)
    disk.load("pinned", small(), pin=True)
    for name in "abc":
        disk.load(name, small())
        assert disk.residency()["pinned"] == "device"
    disk.load("pinned", small(), replace=True)
    disk.load("d", small())
    disk.load("e", small())
    assert disk.residency()["pinned"] == "host"


def test_pins_that_leave_no_room_are_an_error_and_change_nothing() -> None:
    disk = Disk(capacity_bytes=2 * ONE)
    disk.load("p", small(), pin=True)
    disk.load("a", make_weights({"k": 1}))
    disk.load("q", small(), pin=True)
    before = disk.pool.infos()
    for pin in (True, False):
        with pytest.raises(AdapterLoadError, match=r"no room.* 28 bytes.* 56 pinned adapters hold 56.*`pin`"):
            disk.load("more", small(), pin=pin)
    assert disk.pool.infos() == before
    lease = disk.pool.acquire("a")
    disk.run_jobs()
    with pytest.raises(AdapterLoadError, match="pinned"):
        lease.ready.result(0)


def test_an_adapter_larger_than_the_device_is_an_error_and_sends_nobody_away() -> None:
    disk = Disk(capacity_bytes=2 * ONE)
    disk.load("a", small())
    with pytest.raises(AdapterLoadError, match=r"'large'.* 84 bytes.*adapter_bytes is 56: raise"):
        disk.load("large", make_weights({"q": 3}))
    assert disk.residency() == {"a": "device"}


def test_a_pinned_load_waits_for_room_and_cancelled_it_leaves_nothing() -> None:
    disk = Disk(capacity_bytes=ONE)
    disk.load("a", small())
    user = wait(disk, "a")
    futures = [disk.ask(f"p{number}", small(), pin=True) for number in range(2)]
    disk.run_jobs()
    assert not any(future.done() for future in futures)
    assert list(disk.residency()) == ["a"]
    futures[0].cancel()
    disk.pool.release(user)
    disk.run_jobs()
    assert futures[1].result(0).residency == "device"
    assert disk.residency() == {"a": "host", "p1": "device"}


# --- unknown names


def test_an_unknown_name_is_sought_once_for_all_who_ask_and_read_once() -> None:
    disk = Disk(resolving=True)
    weights = small()
    leases = [disk.pool.acquire("acme") for _ in range(50)]
    assert disk.pool.unresolved.qsize() == 1
    generation = disk.pool.unresolved.get()
    assert disk.pool.is_sought(generation) and leases[0].ref is None
    disk.pool.resolved(generation, disk.save("anywhere", weights))
    disk.run_jobs()
    assert disk.num_reads == 1
    assert all(lease.ready.done() and holds(disk.arena, lease.slot, weights) for lease in leases)
    assert [(info.name, info.in_use) for info in disk.pool.infos()] == [("acme", 50)]
    assert disk.pool.acquire("acme").ready is None
    assert disk.pool.unresolved.empty()


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("answer", ["another folder", "unknown", "an error"])
def test_an_unknown_name_that_is_loaded_meanwhile_is_that_whatever_the_resolver_answers(
    answer: str, pin: bool
) -> None:
    disk = Disk(resolving=True)
    lease = disk.pool.acquire("acme")
    generation = disk.pool.unresolved.get()
    weights = small()
    disk.load("acme", weights, pin=pin)
    assert not disk.pool.is_sought(generation)
    assert holds(disk.arena, lease.slot, weights), "it waits for the resolver"
    if answer == "another folder":
        disk.pool.resolved(generation, disk.save("elsewhere", small()))
    else:
        error = AdapterNotFound("no acme") if answer == "unknown" else AdapterLoadError("no network")
        disk.pool.not_resolved(generation, error)
    disk.run_jobs()
    assert disk.num_reads == 1
    assert lease.ready.exception(0) is None and holds(disk.arena, lease.slot, weights)
    disk.pool.release(lease)
    disk.pool.check_integrity()


def test_an_unknown_name_that_nobody_waits_for_any_more_is_forgotten() -> None:
    disk = Disk(resolving=True)
    disk.pool.release(disk.pool.acquire("acme"))
    generation = disk.pool.unresolved.get()
    assert not disk.pool.is_sought(generation)
    disk.pool.resolved(generation, disk.save("acme", small()))
    disk.run_jobs()
    assert (disk.num_reads, disk.pool.infos()) == (0, [])


def test_each_who_asks_for_what_nobody_knows_has_an_error_of_its_own() -> None:
    disk = Disk(resolving=True)
    leases = [disk.pool.acquire("acme") for _ in range(3)]
    disk.pool.not_resolved(disk.pool.unresolved.get(), AdapterNotFound("no acme"))
    errors = [lease.ready.exception(0) for lease in leases]
    assert all(isinstance(error, AdapterNotFound) for error in errors) and len(set(map(id, errors))) == 3
    for lease in leases:
        disk.pool.release(lease)
    disk.pool.acquire("acme")
    assert disk.pool.unresolved.qsize() == 1, "it may be known by now"


def wait(disk: Disk, name: str) -> AdapterLease:
    """A lease that has its slot."""
    lease = disk.pool.acquire(name)
    disk.run_jobs()
    assert lease.slot >= 0
    return lease


def test_the_loader_is_called_for_nothing_while_an_adapter_waits_for_room() -> None:
    disk = Disk(28)
    for name in ("a", "b"):
        disk.load(name, make_weights({"q": 1}))
    holder, waiter = (
        disk.pool.acquire("b"),
        disk.pool.acquire("a"),
    )  # the latest to be loaded is on the device
    disk.run_jobs()
    assert disk.pool.next_job() is None and disk.pool.work.empty(), "a loader that asks again and again"
    disk.pool.release(holder)
    assert disk.pool.work.get_nowait()
    disk.run_jobs()
    assert waiter.slot >= 0
