"""A shuffled order of n things that is not kept anywhere: a bijection of range(n), evaluated at one place at a time.

A balanced Feistel network permutes the numbers of 2k bits, whatever its round function; numbers that come out past n are put
in again until they fall below it ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). That
takes fewer than four rounds of it on average, and no memory.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8
_M64 = (1 << 64) - 1


class Shuffle:
    """A permutation of range(n), chosen by the key; `self[i]` is what comes at place i."""

    def __init__(self, n: int, *key: int | str) -> None:
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        stream = hashlib.shake_128(repr((n, *key)).encode()).digest(8 * _ROUNDS)
        self._keys = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.n:
            raise IndexError(place)
        half, mask, x = self._half, (1 << self._half) - 1, place
        while True:
            left, right = x >> half, x & mask
            for key in self._keys:
                # The finalizer of SplitMix64, of which the high bits are taken.
                z = ((right ^ key) * 0xBF58476D1CE4E5B9) & _M64
                z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
                left, right = right, left ^ ((z >> 20) & mask)
            x = left << half | right
            if x < self.n:
                return x

    def first(self, count: int) -> np.ndarray:
        """Returns what comes at the places 0 to `count` - 1, int64."""
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        x = np.arange(count, dtype=np.uint64)
        outside = np.ones(count, bool)
        while outside.any():
            left, right = x[outside] >> half, x[outside] & mask
            for key in self._keys:
                z = (right ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
                z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                left, right = right, left ^ ((z >> np.uint64(20)) & mask)
            x[outside] = left << half | right
            outside = x >= np.uint64(self.n)
        return x.astype(np.int64)
