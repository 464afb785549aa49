"""The slot map's memory: what a feature buffer remembers of its slots, as plain arrays in one block.

A slot map says which row is in which slot. It costs memory by slots, not by nodes: rows are found through a
hash with chains (``heads``, ``next``; multiply-shift after Dietzfelbinger et al., J. Algorithms 25(1), 1997),
and what is known of one slot lies together in a record of 32 bytes, half a cache line, because a lookup costs
what its cache misses cost; for the same reason there are at least three chains for each slot. Everything lies
in one block of memory and holds no address, so the block may be shared by processes: one makes the map in it
(:func:`make_slot_map`), the others attach (:func:`attach_slot_map`). Whoever changes it holds a lock.

A slot is EMPTY; IN_FLIGHT while its row is being read; PRESENT; or FAILED, when the read failed while others
than the reader counted on it (see :mod:`featstore.tiers.slots.slots`). ``pins`` counts those who use the row,
a read under way included. A slot without pins may be given to another row.

Fields of a record: ``row`` int64 (-1: none), ``next`` int32 (the next slot of the chain, or of the free
ones), ``pins`` int32, then what policies need: ``place`` int32 (in a queue), ``last_use`` and ``due`` int32
(scores), in the place of ``due`` ``stamp`` (MIN: the next use); ``status``, ``mark`` and ``queue`` uint8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import as_count, as_number
from featstore.errors import ArgumentError, BudgetError

EMPTY, IN_FLIGHT, PRESENT, FAILED = 0, 1, 2, 3

STATIC, FIFO, LRU, CLOCK, SIEVE, S3FIFO, SCORE, MIN = range(8)
#: Policies by name; see :mod:`featstore.tiers.slots.policies`.
POLICIES: Mapping[str, int] = {
    "static": STATIC, "fifo": FIFO, "lru": LRU, "clock": CLOCK, "sieve": SIEVE, "s3-fifo": S3FIFO,
    "score": SCORE, "min": MIN,
}  # fmt: skip

#: What :func:`make_slot_map` takes of policies.
OPTIONS = ("small", "resident", "gamma", "delta", "alpha")
DELTA_MAX = 2**20

#: The next use of a row that is not used again.
NEVER = 2**31 - 1

# Places in ``counts``.
MAGIC, POLICY, SLOTS, SHIFT = 0, 1, 2, 3
HITS, MISSES, WAITS, EVICTIONS, BATCHES = 4, 5, 6, 7, 8
UNPINNED, FREE, FRESH, HAND = 9, 10, 11, 12
BEGIN, END, LENGTH, IDLE = 13, 15, 17, 19  # of two queues each
SMALL_MAX, GHOST_MAX, GHOST_CLOCK = 21, 22, 23
RESIDENT, RESIDENT_MAX, DELTA, THRESHOLD = 24, 25, 26, 27
FAR, BATCHES_MAX, CURSOR = 28, 29, 30
_COUNTS = 32

_MAGIC = 0x31504D53  # "SMP1"
_ALIGNMENT = 64
#: Miss counts and access scores end here.
COUNT_MAX = 255
WAYS = 4  # entries of a bucket of fingerprints

RECORD = np.dtype(
    {
        "names": ["row", "next", "pins", "place", "last_use", "due", "stamp", "status", "mark", "queue"],
        "formats": ["<i8", "<i4", "<i4", "<i4", "<i4", "<i4", "<i4", "u1", "u1", "u1"],
        "offsets": [0, 8, 12, 16, 20, 24, 24, 28, 29, 30],
        "itemsize": 32,
    }
)
RECORD_BYTES = 32
#: Places in the logs of two queues, 2 * slots each, are int32.
BUFFER_ROWS_MAX = 2**29


class SlotMap(NamedTuple):
    """The arrays of a slot map; see the module's text. ``counts`` holds counters and scalars, at the places
    named above."""

    counts: NDArray[np.int64]  # [32]
    heads: NDArray[np.int32]  # [2^k >= 3 * slots], the first slot of each chain or -1
    slots: NDArray[Any]  # [slots] of RECORD
    log: NDArray[np.int32]  # queues of slots, see :mod:`featstore.tiers.slots.policies_queues`
    ghosts: NDArray[np.int64]  # S3-FIFO and SCORE: buckets of fingerprints
    # MIN: the first slot for each next use; SCORE: batches until a score is below alpha
    table: NDArray[np.int32]


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def queue_capacity(slots: int) -> int:
    """Entries of one queue's log: as many as there are slots, and as many that are stale."""
    return 2 * slots


def _parts(slots: int, policy: int, batches: int) -> list[tuple[str, np.dtype[Any], int]]:
    """Name, type and length of the arrays of a map's block, in order."""
    ghosts = max(WAYS, _power_of_two(slots)) if policy in (S3FIFO, SCORE) else 0
    queues = 2 if policy in (S3FIFO, MIN) else 1 if policy in (LRU, SIEVE, SCORE) else 0
    table = batches + 1 if policy == MIN else COUNT_MAX + 1 if policy == SCORE else 0
    return [
        ("counts", np.dtype(np.int64), _COUNTS),
        ("heads", np.dtype(np.int32), max(4, _power_of_two(3 * slots))), ("slots", RECORD, slots),
        ("log", np.dtype(np.int32), queues * queue_capacity(slots)), ("ghosts", np.dtype(np.int64), ghosts),
        ("table", np.dtype(np.int32), table),
    ]  # fmt: skip


def _check(slots: int, policy: int, batches: int) -> None:
    if not 1 <= slots <= BUFFER_ROWS_MAX:
        raise ArgumentError(f"a buffer has from 1 to {BUFFER_ROWS_MAX:,} slots, not {slots:,}")
    if policy not in POLICIES.values():
        raise ArgumentError(f"no policy {policy}; there are {dict(POLICIES)}")
    if policy == MIN and not 1 <= batches < NEVER:
        raise ArgumentError("the policy min needs the number of mini-batches of its trace: batches=...")


def slot_map_bytes(slots: int, policy: int, batches: int = 0) -> int:
    """Memory of a slot map in bytes: 44 to 56 a slot; 8 more for a queue, 16 for two, 8 to 16 for
    fingerprints; for MIN 4 more for each mini-batch."""
    _check(slots, policy, batches)
    return sum(
        -(-dtype.itemsize * n // _ALIGNMENT) * _ALIGNMENT for _, dtype, n in _parts(slots, policy, batches)
    )


def _views(memory: NDArray[np.uint8], slots: int, policy: int, batches: int) -> SlotMap:
    found: dict[str, NDArray[Any]] = {}
    at = 0
    for name, dtype, length in _parts(slots, policy, batches):
        size = dtype.itemsize * length
        found[name] = memory[at : at + size].view(dtype)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return SlotMap(**found)


def make_slot_map(
    slots: int, policy: int, *, memory: NDArray[np.uint8] | None = None, batches: int = 0, small: float = 0.1,
    resident: float = 0.75, gamma: float = 0.95, delta: int = 32, alpha: float | None = None,
) -> SlotMap:  # fmt: skip
    """A slot map in which all slots are empty.

    Args:
        slots: how many rows fit in the buffer.
        policy: one of :data:`POLICIES`.
        memory: uint8 of at least :func:`slot_map_bytes`, aligned to 64 bytes, to put the map in; made where
            not given.
        batches: MIN: the mini-batches of the trace; next uses are below that, or NEVER.
        small: S3-FIFO: the share of slots of the small queue.
        resident: SCORE: the share of slots for rows that are kept by their score; misses pass through the
            others.
        gamma, delta, alpha: SCORE: decay, period in mini-batches and threshold; alpha is gamma ** delta where
            not given.

    Raises ArgumentError for what is out of range, BudgetError where the memory is too small.
    """
    needed = slot_map_bytes(slots, policy, batches)
    if memory is None:
        raw = np.empty(needed + _ALIGNMENT, np.uint8)
        memory = raw[-raw.ctypes.data % _ALIGNMENT :]
    if len(memory) < needed:
        raise BudgetError(needed, len(memory), f"hold the map of {slots:,} slots")
    if memory.ctypes.data % _ALIGNMENT:
        raise ArgumentError("the memory of a slot map must be aligned to 64 bytes")
    m = _views(memory, slots, policy, batches)
    for array in m:
        array.view(np.uint8)[...] = 0
    for array in (m.heads, m.slots["row"], m.slots["next"]):
        array[...] = -1
    c = m.counts
    c[POLICY], c[SLOTS], c[UNPINNED] = policy, slots, slots
    c[SHIFT] = 64 - (len(m.heads).bit_length() - 1)
    c[[FREE, FAR, CURSOR]] = -1
    c[[BEGIN + 1, END + 1]] = queue_capacity(slots)
    if policy == S3FIFO:
        _check_share(small, "small")
        c[SMALL_MAX] = max(1, int(slots * small))
        c[GHOST_MAX] = slots - c[SMALL_MAX]
    elif policy == SCORE:
        _check_share(resident, "resident")
        m.table[:] = lifetimes(gamma, delta, alpha)
        c[RESIDENT_MAX], c[DELTA], c[THRESHOLD] = int(slots * resident), delta, 1
    elif policy == MIN:
        m.table[:] = -1
    c[BATCHES_MAX] = batches
    c[MAGIC] = _MAGIC  # last: a map that was not finished is none
    return m


def attach_slot_map(memory: NDArray[np.uint8]) -> SlotMap:
    """The slot map that another process made in a block of shared memory. Raises ArgumentError where there is
    none."""
    counts = (
        memory[: 8 * _COUNTS].view(np.int64) if len(memory) >= 8 * _COUNTS else np.zeros(_COUNTS, np.int64)
    )
    slots, policy, batches = int(counts[SLOTS]), int(counts[POLICY]), int(counts[BATCHES_MAX])
    if counts[MAGIC] != _MAGIC or len(memory) < slot_map_bytes(slots, policy, batches):
        raise ArgumentError("this memory holds no slot map; make_slot_map makes one")
    return _views(memory, slots, policy, batches)


def _check_share(share: float, name: str) -> None:
    if not 0 < as_number(share, name, 0, 1) < 1:
        raise ArgumentError(f"{name} is a share of the slots, more than 0 and less than 1, not {share}")


def lifetimes(gamma: float, delta: int, alpha: float | None = None) -> NDArray[np.int32]:
    """In how many mini-batches without use a score falls below alpha, for each score from 0 to COUNT_MAX.
    int32 [COUNT_MAX + 1].

    So a slot needs no score that decays in every mini-batch, but the mini-batch in which it is due.
    """
    as_count(delta, "delta", 1, DELTA_MAX)
    if not 0 < as_number(gamma, "gamma", 0, 1) < 1:
        raise ArgumentError(f"gamma must be between 0 and 1, not {gamma}")
    if alpha is None:
        alpha = 1.0
        for _ in range(delta):
            alpha *= gamma
    if as_number(alpha, "alpha") <= 0:
        raise ArgumentError(f"alpha must be more than 0, not {alpha}: no score would ever fall below")
    scores = np.arange(COUNT_MAX + 1, dtype=np.float64)
    found = np.zeros(COUNT_MAX + 1, np.int32)
    while (alive := scores >= alpha).any():
        found += alive
        scores *= gamma
    return found
