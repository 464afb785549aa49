"""From mini-batches to a compiled trace: record, compile (DiskGNN's interface, section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from featstore.base.system import is_there
from featstore.compile.build import compile_trace
from featstore.loaders.prefetch import Sampler, epoch_of
from featstore.storage.disk import Disk
from featstore.storage.manifest import MANIFEST_NAME
from featstore.storage.packs import TRACES, packs_directory, packs_to_write, preparing, remove_trace
from featstore.storage.store import OpenStore
from featstore.trace.trace import Trace


def compiled_once(
    store: OpenStore, sampler: Sampler, name: str, *, epochs: int = 1, reuse: bool = False, **options: Any
) -> None:
    """Record the sampler's first epochs and compile them under ``name``, unless ``reuse`` finds that there.
    ``options``: of :func:`featstore.compile_trace`. Raises StoreLockedError where another loader has the
    name."""
    if reuse and is_there(packs_directory(store) / name / MANIFEST_NAME):
        return
    packs, door = packs_to_write(store), Disk()
    door.mkdir(packs)
    lock = preparing(packs, name)
    try:
        with Trace.record(_epochs(sampler, epochs), packs / f"{name}{TRACES}", overwrite=True) as trace:
            compile_trace(store, trace, name, overwrite=True, **options)
        remove_trace(packs / f"{name}{TRACES}", door)
    finally:
        lock.release(remove=True)


def _epochs(sampler: Sampler, epochs: int) -> Iterator[Any]:
    for number in range(epochs):
        yield from epoch_of(sampler, number)
