"""Philox4x32-10, a counter-based random function (Salmon et al., SC 2011, "Parallel random numbers").

A draw is a function of (seed; choice index, position, purpose) with no history, so a request's tokens do
not depend on what runs beside it, and every backend can compute the same number on its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = np.outer(np.arange(10, dtype=np.uint64), np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64))
"""What is added to the key by each round, [10, 2]."""
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

CHOOSE_TOKEN = 0
"""The purpose of these numbers: another use of a seed shall take another purpose, and so meet none of them."""


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds. counter [..., 4] and key [..., 2], 32-bit words held in uint64 -> [..., 4] such words."""
    # The first and third word side by side, and the second and fourth: few operations, as few numbers make each dear.
    multiplied, mixed = counter[..., ::2], counter[..., 1::2]
    for step in _KEY_STEPS:
        product = (_MULTIPLIERS * multiplied)[..., ::-1]
        multiplied, mixed = (product >> _32) ^ mixed ^ ((key + step) & _MASK), product & _MASK
    return np.stack((multiplied, mixed), axis=-1).reshape(counter.shape)


def uniform(
    seed: NDArray[np.uint64], position: NDArray[np.uint64], choice: NDArray[np.uint64] | int = 0
) -> NDArray[np.float64]:
    """One number in [0, 1) with 24 bits for each (seed, position, choice), each [n], or one choice for all.

    `position` is the index of the output token, `choice` that of the output among the n of its request.
    """
    choice, purpose = np.full_like(position, choice), np.full_like(position, CHOOSE_TOKEN)
    counter = np.stack((position & _MASK, position >> _32, choice, purpose), axis=-1)
    key = np.stack((seed & _MASK, seed >> _32), axis=-1)
    first_word = philox4x32(counter, key)[..., 0]
    numbers: NDArray[np.float64] = (first_word >> np.uint64(8)).astype(np.float64) * 2.0**-24
    return numbers
