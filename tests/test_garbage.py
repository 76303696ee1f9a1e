from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from motet.garbage import collections_paused


@pytest.fixture(autouse=True)
def collector_as_found() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    if not was_enabled:
        gc.disable()


def test_nothing_is_collected_inside_and_everything_may_be_afterwards() -> None:
    with collections_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_inside_ends_the_pause() -> None:
    with pytest.raises(KeyError), collections_paused():
        raise KeyError
    assert gc.isenabled()


def test_the_outermost_block_ends_the_pause() -> None:
    with collections_paused():
        with collections_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_application_that_has_collections_off_keeps_them_off() -> None:
    gc.disable()
    with collections_paused():
        pass
    assert not gc.isenabled()


def test_what_was_made_inside_is_not_walked_by_the_next_young_collection_but_by_a_full_one() -> None:
    with collections_paused():
        cycle: list[object] = []
        cycle.append(cycle)
        old = id(cycle)
    assert all(id(thing) != old for young in (0, 1) for thing in gc.get_objects(generation=young))
    assert any(id(thing) == old for thing in gc.get_objects(generation=2))


def test_what_the_application_has_frozen_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collections_paused():
        pass
    assert gc.get_freeze_count() >= frozen > 0
