"""Filling a recording from an iterable of mini-batches, from its beginning or from where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from featstore import arguments as args
from featstore.base.dtypes import Scalar
from featstore.base.sequences import known_length
from featstore.errors import SourceError
from featstore.sampling.minibatch import Ids, split
from featstore.trace.recorder import Recorder
from featstore.trace.sample_encoder import encode


@dataclass(frozen=True)
class TraceProgress:
    """How far a recording is. ``total_batches`` is None where the iterable does not tell; ``bytes`` are those
    of the log."""

    done_batches: int
    total_batches: int | None
    bytes: int


def checked_fingerprint(fingerprint: Mapping[str, Scalar] | None) -> dict[str, Scalar] | None:
    if fingerprint is None:
        return None
    for key, value in args.as_mapping(fingerprint, "fingerprint", "names to values").items():
        good = type(key) is str and type(value) in (str, int, float, bool, type(None))
        if isinstance(value, int | float):
            good = good and math.isfinite(value) and (isinstance(value, float) or abs(value) < 2**63)
        if not good:
            raise SourceError(
                f"a fingerprint is text, finite numbers, booleans and None, not {key!r}: {value!r}"
            )
    return dict(sorted(fingerprint.items()))


def fill(
    recorder: Recorder, batches: Iterable[Any], nodes: Callable[[Any], Any] | None, drop: Collection[str],
    limit: int | None, progress: Callable[[TraceProgress], None] | None,
) -> None:  # fmt: skip
    """Record what is not recorded yet."""
    done = len(recorder)
    total = min((n for n in (known_length(batches), limit) if n is not None), default=None)
    if total is not None and done > total:
        raise SourceError(
            f"the unfinished recording has {done:,} mini-batches already, more than the {total:,} to "
            "record; give more, or start anew with overwrite"
        )
    source = _after(batches, max(0, done - 1))
    if done:
        _compare(recorder, next(source, None), nodes, done - 1)
    for number, batch in enumerate(islice(source, None if limit is None else limit - done), done):
        try:
            ids, sample = split(batch, nodes)
            data = np.empty(0, np.uint8) if sample is None else encode(sample, drop=drop)
            recorder.append(ids, data)
        except SourceError as error:
            raise SourceError(f"mini-batch {number}: {error}") from None
        if progress is not None:
            progress(TraceProgress(number + 1, total, recorder.bytes))
    if total is not None and len(recorder) < total:
        raise SourceError(
            f"the iterable gave {len(recorder):,} mini-batches, and says that it has {total:,}: what is "
            "recorded is kept, for resume=True; give all of them, or limit= for as many"
        )
    if len(recorder) == 0:
        raise SourceError(
            "there is nothing to record: the iterable gave no mini-batch (an iterator gives its own "
            "only once)"
        )


def _after(batches: Iterable[Any], skip: int) -> Iterator[Any]:
    """The mini-batches from number ``skip`` on; of a sequence, the earlier ones are not made."""
    if isinstance(batches, Sequence):
        return map(batches.__getitem__, range(skip, len(batches)))
    return islice(batches, skip, None)


def _compare(recorder: Recorder, batch: Any, nodes: Callable[[Any], Any] | None, number: int) -> None:
    """Raise SourceError where the mini-batch recorded last is not what the iterable has in its place."""
    if batch is not None:
        now: Ids = {name: one for name, one in split(batch, nodes)[0].items() if len(one)}
        then = {name: one for name, one in recorder.last_ids.items() if len(one)}
        if now.keys() == then.keys() and all(np.array_equal(now[name], then[name]) for name in now):
            return
    raise SourceError(
        f"cannot resume: mini-batch {number}, the last one recorded, is not what the iterable has in "
        "its place; give the same mini-batches in the same order (a sampler with the same seed, and "
        "no shuffling of its own), or start anew with overwrite"
    )
