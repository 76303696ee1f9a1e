from __future__ import annotations

import numpy as np
import pytest

from motet.kernels.philox import CHOOSE_TOKEN, philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array(counter, np.uint64), np.array(key, np.uint64))
    assert words.tolist() == expected


def test_a_batch_equals_its_rows() -> None:
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 1 << 32, (50, 4), dtype=np.uint64)
    keys = rng.integers(0, 1 << 32, (50, 2), dtype=np.uint64)
    batch = philox4x32(counters, keys)
    for row, counter, key in zip(batch, counters, keys, strict=True):
        assert row.tolist() == philox4x32(counter, key).tolist()


def draw(seed: int, position: int, **where: int) -> float:
    return float(uniform(np.array([seed], np.uint64), np.array([position], np.uint64), **where)[0])


def test_the_number_is_the_first_words_upper_24_bits() -> None:
    seed, position, choice = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 3
    word = philox4x32(
        np.array([0x76543210, 0xFEDCBA98, choice, CHOOSE_TOKEN], np.uint64),
        np.array([0x89ABCDEF, 0x01234567], np.uint64),
    )[0]
    assert draw(seed, position, choice=choice) == (int(word) >> 8) / 2**24


def test_seed_position_and_choice_each_make_a_difference() -> None:
    numbers = {
        draw(1, 1),
        draw(2, 1),
        draw(1 + (1 << 32), 1),
        draw(1, 2),
        draw(1, 1 + (1 << 32)),
        draw(1, 1, choice=1),
        draw((1 << 64) - 1, (1 << 64) - 1),
    }
    assert len(numbers) == 7


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_numbers_lie_evenly_below_one(vary: str) -> None:
    many, one = np.arange(40_000, dtype=np.uint64), np.full(40_000, 7, np.uint64)
    numbers = uniform(many, one) if vary == "seed" else uniform(one, many)
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=100, range=(0.0, 1.0))
    # Chi-square with 99 degrees of freedom: above 170 in one of 100,000 runs, and these numbers are fixed.
    assert ((counts - 400) ** 2 / 400).sum() < 170
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_each_row_has_a_choice_of_its_own() -> None:
    choices = [0, 1, 5, 1]
    batch = uniform(np.full(4, 7, np.uint64), np.full(4, 2, np.uint64), np.array(choices, np.uint64))
    assert batch.tolist() == [draw(7, 2, choice=choice) for choice in choices]
