from __future__ import annotations

import pytest
import torch
from lora_factories import MODULES, SITES, holds, make_arena, make_weights, num_bytes, weights_in

from motet.lora.adapter import LoRAWeights
from motet.lora.arena import AdapterArena


def test_each_adapter_takes_its_own_size_and_nothing_for_a_larger_neighbour() -> None:
    arena = make_arena()
    small, large = make_weights({"q": 1}), make_weights(dict.fromkeys(MODULES, 64))
    slots = [arena.place(arena.pack(w)) for w in (small, large)]
    assert (
        [arena.nbytes(slot) for slot in slots] == [num_bytes(small), num_bytes(large)] == [4 * 7, 4 * 64 * 25]
    )
    assert arena.used_bytes == num_bytes(small) + num_bytes(large)
    assert holds(arena, slots[0], small)
    assert holds(arena, slots[1], large)
    arena.check_integrity()


def test_columns_of_a_site_are_those_of_its_projections_side_by_side() -> None:
    arena = make_arena()
    assert [arena.slices(site).bounds.tolist() for site in (0, 1)] == [[0, 4, 6, 8], [0, 3]]
    assert [arena.slices(site)[:3] for site in (0, 1)] == [(0, 0, 3), (1, 3, 5)]
    assert arena.slices(0) is arena.slices(0)  # asked for 120 times a step: never made anew


def test_slots_have_no_limit_but_the_memory_and_growth_leaves_all_in_place() -> None:
    arena = make_arena()
    placed: dict[int, LoRAWeights] = {}
    held_by_a_step = arena.table
    first = make_weights({"q": 2, "o": 1})
    placed[arena.place(arena.pack(first))] = first
    before = arena.table[0].clone()
    for rank in range(1, 40):
        weights = make_weights({MODULES[rank % 4]: rank % 5 + 1})
        placed[arena.place(arena.pack(weights))] = weights
        arena.check_integrity()
    assert sorted(placed) == list(range(40))
    assert all(holds(arena, slot, weights) for slot, weights in placed.items())
    # A step that took its table before the growth still finds its adapter.
    assert held_by_a_step is not arena.table
    assert torch.equal(held_by_a_step[0], before)


def test_removed_memory_and_slots_are_used_again() -> None:
    arena = make_arena(4 * 25 * 4)  # room for one of rank 4
    for _ in range(20):
        slot = arena.place(arena.pack(make_weights(dict.fromkeys(MODULES, 4))))
        assert slot == 0
        assert arena.used_bytes == arena.capacity_bytes
        arena.remove(slot)
        assert arena.used_bytes == 0
        arena.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_copied_out_comes_back_elsewhere_as_it_was(dtype: torch.dtype) -> None:
    arena = AdapterArena(SITES, torch.empty(4096 // dtype.itemsize, dtype=dtype))
    extras: dict[str, list[str]] = {"scaled": ["o"], "shifted": ["q", "o"]}
    first, slot = (arena.place(arena.pack(make_weights({"q": rank, "o": 3}, **extras))) for rank in (1, 2))
    before = {m: [tensor.clone() for tensor in x.tensors()] for m, x in weights_in(arena, slot).items()}
    copy = arena.copy_out(slot)
    assert copy.nbytes == arena.nbytes(slot)
    arena.remove(slot)
    arena.remove(first)
    arena.data.fill_(float("nan"))
    arena.place(arena.pack(make_weights({"k": 1})))
    back = weights_in(arena, arena.place(copy))
    arena.check_integrity()
    assert back.keys() == before.keys() == {"q", "o"}
    assert all(torch.equal(x, y) for m in before for x, y in zip(before[m], back[m].tensors(), strict=True))


def test_what_fits_fits_in_one_piece_and_nothing_else_is_placed() -> None:
    arena = make_arena(4 * 7 * 3)
    slots = [arena.place(arena.pack(make_weights({"q": 1}))) for _ in range(3)]
    assert not arena.fits(28) and arena.fits(84, slots)
    arena.remove(slots[0])
    arena.remove(slots[2])
    assert arena.fits(28) and not arena.fits(56) and arena.fits(56, [slots[1]])
    with pytest.raises(AssertionError, match="does not fit"):
        arena.place(arena.pack(make_weights({"q": 2})))
    assert arena.used_bytes == 28
    arena.check_integrity()


def test_an_arena_without_memory_takes_nothing() -> None:
    arena = make_arena(0)
    assert not arena.fits(4)
    arena.check_integrity()


def test_memory_is_counted_in_the_arenas_dtype() -> None:
    arena = AdapterArena(SITES, torch.empty(500, dtype=torch.bfloat16))
    weights = make_weights({"q": 3})
    slot = arena.place(arena.pack(weights))
    assert arena.nbytes(slot) == arena.used_bytes == num_bytes(weights) // 2
    assert arena.capacity_bytes == 1000


def test_the_integrity_check_sees_weights_outside_their_extent() -> None:
    arena = make_arena()
    slot = arena.place(arena.pack(make_weights({"q": 2, "o": 3})))
    for entry in range(3):  # a, b, rank
        arena.table[slot, 0, entry] += 1
        with pytest.raises(AssertionError):
            arena.check_integrity()
        arena.table[slot, 0, entry] -= 1
    arena.check_integrity()


def test_scales_and_shifts_are_kept_beside_the_lora_or_without_one() -> None:
    arena = make_arena()
    ranks = {"q": 2, "k": 0, "o": 3}
    weights = make_weights(ranks, scaled=["q"], shifted=["q", "k"])
    plain = make_weights(ranks | {"k": 1})
    slots = [arena.place(arena.pack(w)) for w in (plain, weights, plain)]
    assert arena.nbytes(slots[1]) == num_bytes(weights) == 4 * (2 * 7 + 3 * 8 + 4 + 4 + 2)
    assert holds(arena, slots[1], weights)
    assert holds(arena, slots[0], plain)
    arena.check_integrity()
    arena.remove(slots[1])
    arena.check_integrity()
    assert arena.place(arena.pack(plain)) == slots[1]
    assert holds(arena, slots[1], plain)


def test_it_is_known_at_which_sites_an_adapter_acts() -> None:
    arena = make_arena()
    q, o = (
        arena.place(arena.pack(w)) for w in (make_weights({"q": 2}), make_weights({"o": 0}, shifted=["o"]))
    )
    assert [arena.acts(slots).tolist() for slots in ([q], [o], [q, o], [])] == [
        [True, False],
        [False, True],
        [True, True],
        [False, False],
    ]
    arena.remove(q)
    assert arena.acts([q, o]).tolist() == [False, True]
