"""Philox4x32-10, a counter-based random function (Salmon et al., SC 2011, "Parallel random numbers").

A draw is a function of (seed; choice index, position, purpose) with no history, so a request's tokens do
not depend on what runs beside it, and every backend can compute the same number on its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

CHOOSE_TOKEN = 0
"""The purpose of these numbers: another use of a seed shall take another purpose, and so meet none of them."""


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds. counter [..., 4] and key [..., 2], 32-bit words held in uint64 -> [..., 4] such words."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK, (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + np.uint64(_W0)) & _MASK, (k1 + np.uint64(_W1)) & _MASK
    return np.stack((c0, c1, c2, c3), axis=-1)


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
