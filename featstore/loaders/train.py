"""From mini-batches to a compiled trace: record, compile (DiskGNN's interface, section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featstore.base.system import is_there
from featstore.compile.build import compile_trace
from featstore.compile.forecast import CompileForecast
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.loaders.whole import tells_ids
from featstore.storage.belongings import NOTHING
from featstore.storage.disk import Disk
from featstore.storage.manifest import MANIFEST_NAME
from featstore.storage.packs import TRACES, packs_directory, packs_to_write, preparing, remove_trace
from featstore.storage.store import OpenStore
from featstore.trace.told_ids import TOLD
from featstore.trace.trace import Trace


def compiled_once(
    store: OpenStore, sampler: Sampler, name: str, *, epochs: int = 1, reuse: bool = False, **options: Any
) -> bool:
    """Record the sampler's first epochs and compile them under ``name``, unless ``reuse`` finds that there;
    whether it did. ``options``: of :func:`featstore.compile_trace`. Raises StoreLockedError where another
    loader has the name."""
    found = reuse and is_there(packs_directory(store) / name / MANIFEST_NAME)
    if not found:
        _compile(store, sampler, name, epochs, **options)
    return found


def forecast_once(store: OpenStore, sampler: Sampler, name: str, **options: Any) -> CompileForecast:
    """What :func:`compiled_once` would make of one epoch; nothing of it stays."""
    packs = packs_to_write(store)
    there = is_there(packs)
    try:
        made = _compile(store, sampler, name, 1, dry_run=True, **options)
    finally:
        if not there:
            Disk().rmtree(packs, NOTHING)  # which leaves it where another has written there meanwhile
    assert isinstance(made, CompileForecast)
    return made


def _compile(
    store: OpenStore, sampler: Sampler, name: str, epochs: int, **options: Any
) -> Path | CompileForecast:  # fmt: skip
    packs, door = packs_to_write(store), Disk()
    door.mkdir(packs)
    lock, done = preparing(packs, name), False
    try:
        counts, tell = [0] * epochs, options.get("progress")
        recorded, told = _epochs(sampler, counts), TOLD if tells_ids(sampler) else None
        with Trace.record(
            recorded, packs / f"{name}{TRACES}", overwrite=True, progress=tell, fingerprint=told
        ) as trace:  # fmt: skip
            made = compile_trace(store, trace, name, overwrite=True, epoch_batches=counts, **options)
        done = True
        return made
    finally:
        try:
            if done or options.get("dry_run"):
                remove_trace(packs / f"{name}{TRACES}", door)
        finally:
            lock.release(remove=True)


def _epochs(sampler: Sampler, counts: list[int]) -> Iterator[Any]:
    """The mini-batches of so many epochs, which are counted."""
    for number in range(len(counts)):
        for one in epoch_of(sampler, number):
            counts[number] += 1
            yield one
