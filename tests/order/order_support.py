"""What the tests of orders share: graphs, made up or drawn, and the random numbers of the kernels in plain
Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from featstore.order import chunks

MASK = 2**64 - 1


@dataclass(frozen=True)
class Csc:
    """The sources of all edges by target: those of node v are ``indices[indptr[v] : indptr[v + 1]]``."""

    indptr: np.ndarray
    indices: np.ndarray


def csc(nodes: int, sources: Any, targets: Any, dtype: Any = np.int32, *, ascending: bool = True) -> Csc:
    """The graph of these edges. ``ascending``: each node's sources by number, else in the order of the
    edges."""
    sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
    by_target = np.lexsort((sources, targets)) if ascending else np.argsort(targets, kind="stable")
    indptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(targets, minlength=nodes), out=indptr[1:])
    return Csc(indptr, sources[by_target].astype(dtype))


def planted_edges(nodes: int, groups: int, degree: int, inside: float, seed: int) -> tuple[np.ndarray, ...]:
    """(sources, targets, group of each node): groups are equal, the share ``inside`` of all edges stays in
    one; shuffled ids."""
    rng = np.random.default_rng(seed)
    edges = nodes * degree // 2
    group = rng.permutation(nodes) % groups
    members = np.argsort(group, kind="stable").reshape(groups, -1)
    sources = rng.integers(0, nodes, edges)
    near = members[group[sources], rng.integers(0, members.shape[1], edges)]
    return sources, np.where(rng.random(edges) < inside, near, rng.integers(0, nodes, edges)), group


@st.composite
def graphs(draw: st.DrawFn, nodes_max: int, edges_max: int, *, ascending: bool = True) -> Csc:
    """Hubs with duplicate edges and self-loops at the front, isolated nodes at the back."""
    nodes = draw(st.integers(0, nodes_max))
    edges = draw(st.integers(0, edges_max)) if nodes else 0
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = (nodes * rng.random((2, edges)) ** draw(st.sampled_from([1, 3]))).astype(np.int64)
    return csc(nodes, *ends, draw(st.sampled_from([np.int32, np.int64])), ascending=ascending)


def mixed(word: int) -> int:
    """SplitMix64's finaliser."""
    word &= MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


class Draws:
    """The numbers of a pass: xorshift64, in Python's integers. Each of its chunks has its own."""

    def __init__(self, seed: int, number: int) -> None:
        self._first = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]) | 1
        self._state = self._first

    def chunk(self, number: int) -> None:
        """Start with those of a chunk."""
        self._state = mixed(self._first + number) | 1 if number else self._first

    def ending(self) -> None:
        """Start with those for the ends of batches."""
        self._state = ~self._first & MASK | 1

    def _word(self) -> int:
        s = self._state
        s ^= (s << 13) & MASK
        s ^= s >> 7
        s ^= (s << 17) & MASK
        self._state = s
        return s

    def unit(self) -> float:
        """From 0 to below 1."""
        return (self._word() >> 40) / 2**24

    def below(self, bound: int) -> int:
        """From 0 to below ``bound``."""
        return (self._word() >> 20) % bound


def ranges(begin: int, end: int, step: int) -> list[range]:
    """The numbers from ``begin`` to below ``end``, cut."""
    return [range(low, min(low + step, end)) for low in range(begin, end, step)]


@contextmanager
def cut_into(chunk: int | None) -> Iterator[None]:
    """Chunks of so many nodes, 16 a batch, or as they are."""
    with pytest.MonkeyPatch.context() as patch:
        if chunk is not None:
            patch.setattr(chunks, "chunk_nodes", lambda _: chunk)
            patch.setattr(chunks, "batch_chunks", lambda _: 16)
        yield
