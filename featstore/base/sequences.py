"""Sequences that are gone through by number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TypeVar

_Item = TypeVar("_Item")


def in_turn(sequence: Sequence[_Item]) -> Iterator[_Item]:
    """All of a sequence. A sequence's own way takes an IndexError for the end, and so the IdError of what
    cannot be had: there would be less of it without a word."""
    return (sequence[index] for index in range(len(sequence)))


def each_of(batches: Iterable[_Item]) -> Iterable[_Item]:
    """What is gone through; a ``Sequence`` that says no way of its own, by :func:`in_turn`."""
    if isinstance(batches, Sequence) and type(batches).__iter__ is Sequence.__iter__:
        return in_turn(batches)
    return batches


def known_length(batches: object) -> int | None:
    """How many there are; None where nobody knows."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        return None  # so say PyTorch's DataLoader over data of unknown length, and PyG's DynamicBatchSampler
