"""One hash: SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA'14), and the keys and draws that are made
of it. What is drawn follows from counters, so that equal seeds give equal samples anywhere.

Digests on disk and orders of rows are made of it, too: what it gives never changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit

#: 2**64 over the golden ratio, odd: SplitMix64's step from word to word, and the multiplier of Fibonacci
#: hashing (Knuth, The Art of Computer Programming 3, 6.4), whose upper bits tell neighbouring keys apart.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

#: The first multiplier of the finaliser.
MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = 2**64
_BLOCK = 1 << 20  # words that are made at once


def _mix(word: int) -> int:
    """The finaliser of SplitMix64 on Python integers (modulo 2**64)."""
    word %= _WORD
    word = (word ^ (word >> 30)) * int(MIX_A) % _WORD
    word = (word ^ (word >> 27)) * int(_MIX_B) % _WORD
    return word ^ (word >> 31)


def batch_key(seed: int, epoch: int, batch_index: int) -> int:
    """A 64-bit key of seed, epoch and batch; each step is mixed, so that neighbouring numbers share
    nothing."""
    key = 0
    for word in (seed, epoch, batch_index):
        key = _mix(key + int(GOLDEN) + word)
    return key


def hop_key(key: int, hop: int) -> np.uint64:
    """The key of a hop of the mini-batch whose key is ``key``."""
    return np.uint64(_mix(key + hop))


@njit(cache=True, nogil=True)
def mix64(word: Any) -> Any:
    """The finaliser of SplitMix64: uint64 to uint64, a bijection; of an array, element by element."""
    word = (word ^ (word >> np.uint64(30))) * MIX_A
    word = (word ^ (word >> np.uint64(27))) * _MIX_B
    return word ^ (word >> np.uint64(31))


def relation_key(key: int, name: str) -> int:
    """The key of a relation, by its name, of the mini-batch whose key is ``key``."""
    return _mix(key ^ int(fold_ids(np.frombuffer(name.encode(), np.uint8).astype(np.int64))))


def random_words(key: np.uint64, count: int) -> NDArray[np.uint64]:
    """``count`` random words, uint64, that follow from the key."""
    words = np.arange(1, count + 1, dtype=np.uint64)
    for low in range(0, count, _BLOCK):  # of which each takes three times itself
        words[low : low + _BLOCK] = mix64(key + GOLDEN * words[low : low + _BLOCK])
    return words


#: FNV-1a of 64 bits (Fowler, Noll and Vo; draft-eastlake-fnv).
_FNV_BEGIN = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)


@njit(cache=True, nogil=True)
def hash_strings(data: NDArray[np.uint8], offsets: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """The hash of each string ``data[offsets[i]:offsets[i + 1]]``: FNV-1a, and the finaliser over it, so that
    its upper bits tell similar strings apart."""
    for i in range(out.shape[0]):
        word = _FNV_BEGIN
        for at in range(offsets[i], offsets[i + 1]):
            word = (word ^ np.uint64(data[at])) * _FNV_PRIME
        out[i] = mix64(word)


@njit(cache=True, nogil=True)
def fold_ids(ids: Any) -> Any:
    """A 63-bit fingerprint of int64 ids and their order: the batch index of a loader that does not tell its
    own."""
    key = GOLDEN
    for position in range(len(ids)):
        key = mix64(key ^ np.uint64(ids[position])) + GOLDEN
    return np.int64(mix64(key) >> np.uint64(1))


@njit(cache=True, nogil=True)
def draw_below(word: Any, limit: Any) -> Any:
    """``word * limit >> 64`` (both uint64, limit < 2**32): a random word turned into a number below
    ``limit``."""
    return ((word >> _HALF) * limit + (((word & _LOW) * limit) >> _HALF)) >> _HALF
