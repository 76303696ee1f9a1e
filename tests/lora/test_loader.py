"""AdapterLoader: folders read, resolvers asked, faults told, all beside the threads that use adapters."""

from __future__ import annotations

import random
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from lora_factories import SITES, make_arena, make_weights, num_bytes

import motet.lora.loader
from motet.errors import (
    AdapterError,
    AdapterExists,
    AdapterLoadError,
    AdapterNotFound,
    EngineClosed,
    UnsupportedAdapter,
)
from motet.kernels.ops import select_ops
from motet.lora.adapter import read_adapter
from motet.lora.arena import AdapterArena
from motet.lora.batch import LoRABatch
from motet.lora.generation import AdapterLease
from motet.lora.loader import AdapterLoader, Resolver
from motet.lora.pool import AdapterPool
from motet.lora.sites import LoRASite

PATIENCE = 20.0


@contextmanager
def running(
    sites: tuple[LoRASite, ...],
    *,
    capacity_bytes: int = 1 << 20,
    host_bytes: int = 0,
    root: Path | None = None,
    resolver: Resolver | None = None,
) -> Iterator[tuple[AdapterPool, AdapterLoader]]:
    arena = AdapterArena(sites, torch.empty(capacity_bytes // 4))
    pool = AdapterPool(arena, host_bytes, resolving=resolver is not None)
    loader = AdapterLoader(pool, arena, sites, root=root, resolver=resolver)
    faults: list[BaseException] = []
    loader.start(faults.append)
    try:
        yield pool, loader
    finally:
        loader.close(lambda: EngineClosed("closed"))
    assert faults == []
    pool.check_integrity()
    assert not any(thread.name == "motet-adapter-loader" for thread in threading.enumerate())


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """All folders that were read, in order."""
    reads: list[Path] = []

    def spy(folder: Path, sites: object) -> object:
        reads.append(folder)
        return read_adapter(folder, sites)  # type: ignore[arg-type]

    monkeypatch.setattr(motet.lora.loader, "read_adapter", spy)
    return reads


def outcome(lease: AdapterLease) -> BaseException | None:
    return None if lease.ready is None else lease.ready.exception(PATIENCE)


# --- folders


def test_what_left_the_device_is_read_from_its_folder_again(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path], num_reads: list[Path]
) -> None:
    first, second = make_adapter("first", seed=1), make_adapter("second", seed=2)
    size = num_bytes(read_adapter(first, sites))
    with running(sites, capacity_bytes=size) as (pool, loader):
        for name, folder in (("a", first), ("b", second)):
            assert loader.load(name, folder).result(PATIENCE).residency == "device"
        assert [info.residency for info in pool.infos()] == ["disk", "device"]
        lease = pool.acquire("a")
        assert outcome(lease) is None
        assert num_reads == [first, second, first]
        assert [info.residency for info in pool.infos()] == ["device", "disk"]
        pool.release(lease)


@pytest.mark.parametrize("fault", ["deleted", "truncated", "changed"])
def test_a_folder_that_is_not_what_it_was_is_an_error_for_its_requests_alone(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path], tmp_path: Path, fault: str
) -> None:
    first, second = make_adapter("first", seed=1), make_adapter("second", seed=2)
    safe = shutil.copytree(first, tmp_path / "safe")
    size = num_bytes(read_adapter(first, sites))
    with running(sites, capacity_bytes=size) as (pool, loader):
        loader.load("a", first).result(PATIENCE)
        loader.load("b", second).result(PATIENCE)
        weights = first / "adapter_model.safetensors"
        if fault == "deleted":
            shutil.rmtree(first)
        elif fault == "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        else:
            shutil.copy(second / weights.name, weights)
        leases = [pool.acquire("a") for _ in range(3)]
        errors = [outcome(lease) for lease in leases]
        assert all(isinstance(error, AdapterLoadError) for error in errors)
        if fault == "changed":
            assert "has changed. Load it again" in str(errors[0])
        for lease in leases:
            pool.release(lease)
        assert pool.acquire("b").ready is None, "b has not left for what did not come"
        pool.remove("b")
        with suppress(FileNotFoundError):
            shutil.rmtree(first)
        shutil.copytree(safe, first)
        loader.load("c", second, replace=True).result(PATIENCE)
        assert pool.infos()[0].residency == "disk"


def test_relative_sources_begin_where_the_process_was_when_they_were_given(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter()
    monkeypatch.chdir(folder.parent)
    with running(sites) as (_, loader):
        future = loader.load("a", folder.name)
        monkeypatch.chdir("/")
        assert future.result(PATIENCE).name == "a"


def test_a_load_that_fails_says_why_and_the_next_one_works(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter()
    with running(sites) as (_, loader):
        with pytest.raises(AdapterLoadError, match="nowhere"):
            loader.load("a", folder / "nowhere").result(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(motet.lora.loader, "read_adapter", lambda *_: [] / 0)
            with pytest.raises(AdapterLoadError, match="adapter 'a' failed: TypeError") as caught:
                loader.load("a", folder).result(PATIENCE)
            assert isinstance(caught.value.__cause__, TypeError)
        loader.load("a", folder).result(PATIENCE)


# --- the root


def test_case_17_nothing_outside_of_the_root_is_opened(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path], tmp_path: Path, num_reads: list[Path]
) -> None:
    outside = make_adapter("outside")
    root = tmp_path / "root"
    inside = shutil.copytree(outside, root / "team" / "inside")
    (root / "link").symlink_to(outside)
    linked_weights = shutil.copytree(outside, root / "linked weights")
    (linked_weights / "adapter_model.safetensors").unlink()
    (linked_weights / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    linked_config = shutil.copytree(outside, root / "linked config")
    (linked_config / "adapter_config.json").unlink()
    (linked_config / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (root / "loop").symlink_to(root / "loop")
    with running(sites, root=root, resolver=lambda name: name) as (pool, loader):
        bad = ("../outside", "team/../../outside", outside, str(outside), "link", "linked weights")
        for source in (*bad, "linked config", "link/../outside", "/", "..", tmp_path / "rooted"):
            with pytest.raises(AdapterLoadError, match=r"leads out of .*adapter_root"):
                loader.load("bad", source).result(PATIENCE)
        for source in ("loop", "a\0b"):
            with pytest.raises(AdapterLoadError):
                loader.load("bad", source).result(PATIENCE)
        lease = pool.acquire("../outside")
        assert isinstance(outcome(lease), AdapterLoadError)
        pool.release(lease)
        assert num_reads == [] or {path.name for path in num_reads} == {"loop"}
        (root / "friend").symlink_to(inside)
        for number, source in enumerate(("team/inside", inside, "friend", "team/../team/inside")):
            loader.load(f"good{number}", source).result(PATIENCE)


def test_case_17_a_link_that_is_turned_outward_later_is_not_followed(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    outside = make_adapter("outside")
    root = tmp_path / "root"
    inside = shutil.copytree(outside, root / "inside")
    (root / "link").symlink_to(inside)
    size = num_bytes(read_adapter(inside, sites))
    with running(sites, capacity_bytes=size, root=root) as (pool, loader):
        loader.load("a", "link").result(PATIENCE)
        loader.load("b", "inside").result(PATIENCE)
        (root / "link").unlink()
        (root / "link").symlink_to(outside)
        lease = pool.acquire("a")
        assert "adapter_root" in str(outcome(lease))
        pool.release(lease)


# --- the resolver


def test_a_resolver_is_asked_once_for_all_who_ask_meanwhile(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path], num_reads: list[Path]
) -> None:
    folder = make_adapter()
    asked: list[tuple[str, str]] = []
    go = threading.Event()

    def resolver(name: str) -> Path:
        asked.append((name, threading.current_thread().name))
        assert go.wait(PATIENCE)
        return folder

    with running(sites, resolver=resolver) as (pool, loader):
        leases = [pool.acquire("acme") for _ in range(50)]
        # A slow resolver holds up nothing else.
        loader.load("other", folder).result(PATIENCE)
        go.set()
        assert [outcome(lease) for lease in leases] == [None] * 50
        assert len(asked) == 1 and asked[0][0] == "acme" and asked[0][1] != threading.current_thread().name
        assert num_reads == [folder] * 2
        for lease in leases:
            pool.release(lease)
        pool.release(pool.acquire("acme"))
        assert len(asked) == 1


def test_what_a_resolver_does_wrong_is_told_by_type(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path]
) -> None:
    unsupported = make_adapter(use_dora=False)
    config = unsupported / "adapter_config.json"
    config.write_text(config.read_text().replace('"peft_type": "LORA"', '"peft_type": "IA3"'))
    answers: dict[str, object] = {
        "none": None,
        "number": 5,
        "nowhere": "/nowhere",
        "unsupported": unsupported,
    }

    def resolver(name: str) -> str | None:
        return answers[name]  # type: ignore[return-value]  # of a wrong type on purpose

    expected: dict[str, type[AdapterError]] = {
        "none": AdapterNotFound,
        "number": AdapterLoadError,
        "nowhere": AdapterLoadError,
        "unsupported": UnsupportedAdapter,
        "raises": AdapterLoadError,
    }
    with running(sites, resolver=resolver) as (pool, _):
        for name, kind in expected.items():
            lease = pool.acquire(name)
            error = outcome(lease)
            assert type(error) is kind, name
            if name == "raises":
                assert isinstance(error.__cause__, KeyError)
            pool.release(lease)
        assert pool.infos() == []


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class _Lost(AdapterNotFound):
    """An application's own, which cannot be made from a text alone."""

    def __init__(self, name: str, *, shelf: int) -> None:
        super().__init__(f"{name} is not on shelf {shelf}")
        self.shelf = shelf


def test_no_error_of_a_resolver_ends_its_thread(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path]
) -> None:
    folder = make_adapter()

    def resolver(name: str) -> Path:
        if name == "unprintable":
            raise _Unprintable
        if name == "lost":
            raise _Lost(name, shelf=3)
        return folder

    with running(sites, resolver=resolver) as (pool, _):
        first, second, lost, good = map(pool.acquire, ("unprintable", "lost", "lost", "good"))
        assert type(outcome(first)) is AdapterLoadError
        errors = [outcome(second), outcome(lost)]
        assert [(type(e), str(e), e.shelf) for e in errors if isinstance(e, _Lost)] == [
            (_Lost, "lost is not on shelf 3", 3)
        ] * 2
        assert errors[0] is not errors[1]
        assert outcome(good) is None
        for lease in (first, second, lost, good):
            pool.release(lease)


def test_closing_waits_for_no_resolver_and_fails_what_waits(
    sites: tuple[LoRASite, ...], make_adapter: Callable[..., Path]
) -> None:
    go, asked = threading.Event(), threading.Event()

    def resolver(name: str) -> None:
        asked.set()
        go.wait(PATIENCE)

    folder = make_adapter()
    size = num_bytes(read_adapter(folder, sites))
    with running(sites, capacity_bytes=size, resolver=resolver) as (pool, loader):
        lease = pool.acquire("slow")
        assert asked.wait(PATIENCE)
        loader.load("a", folder).result(PATIENCE)
        user = pool.acquire("a")
        pinned = loader.load("b", folder, pin=True)
    with pytest.raises(EngineClosed):
        pinned.result(PATIENCE)
    go.set()
    pool.release(lease)
    pool.release(user)


# --- many threads


def race(seed: int, rounds: int, patch: pytest.MonkeyPatch) -> None:
    """Loaders add, replace and remove while two engines compute with what they acquired."""
    arena = make_arena(4 * 25 * 20)
    pool = AdapterPool(arena, 4 * 25 * 10)
    loader = AdapterLoader(pool, arena, SITES)
    ops = select_ops("cpu", "float32")
    names = [f"tenant{i}" for i in range(24)]
    folders: dict[str, object] = {}
    expected: dict[bytes, float] = {}  # digest -> the delta of `o` for an x of ones
    failures: list[BaseException] = []
    patch.setattr(motet.lora.loader, "read_adapter", lambda folder, sites: folders[folder.name])

    def load(random: random.Random) -> None:
        for number in range(rounds):
            name = random.choice(names)
            rank, value = random.randint(1, 4), random.randint(1, 9)
            weights = make_weights({"q": rank, "o": rank}, value=value)
            expected[weights.digest] = 5.0 * rank * value * value  # small integers: exact in float32
            folder = f"{threading.get_ident()} {number}"
            folders[folder] = weights
            with suppress(AdapterExists):
                future = loader.load(name, folder, replace=random.random() < 0.7)
                if random.random() < 0.2:
                    future.cancel()
                elif random.random() < 0.5:
                    future.result(PATIENCE)
            if random.random() < 0.3:
                with suppress(AdapterNotFound):
                    pool.remove(random.choice(names))

    def serve(random: random.Random) -> None:
        leases: list[AdapterLease] = []
        while (loading := any(thread.is_alive() for thread in loaders)) or leases:
            while loading and len(leases) < 12:
                try:
                    leases.append(pool.acquire(random.choice(names)))
                except AdapterNotFound:
                    break
            there = [lease for lease in leases if lease.slot >= 0]
            batch = LoRABatch(ops, arena, [-1, *(lease.slot for lease in there)])
            out = torch.zeros(len(there) + 1, 3)
            batch.add_delta(SITES[1], torch.ones(len(there) + 1, 5), out)
            deltas = [expected[lease.ref.digest] for lease in there if lease.ref is not None]
            assert out.tolist() == [[0.0] * 3, *([delta] * 3 for delta in deltas)]
            random.shuffle(leases)
            for _ in range(random.randint(0, len(leases))):
                pool.release(leases.pop())
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
    loader.start(lambda fault: None)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
        loader.close(lambda: EngineClosed("closed"))
    assert not failures, [traceback.format_exception(failure) for failure in failures]
    assert pool.evictions and pool.reloads
    for info in pool.infos():
        assert info.in_use == 0
        pool.remove(info.name)
    pool.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_load_unload_and_compute_at_once_keep_their_weights(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    race(seed, 100, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 30))
def test_threads_that_load_unload_and_compute_at_once_for_long_keep_their_weights(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    race(seed, 1000, monkeypatch)
