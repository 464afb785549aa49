"""One line from a data set and a sampler to a training loop: record, compile, load (DiskGNN's interface, section 6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featstore.compiled.build import compile_trace, packs_directory
from featstore.compiled.loader import CompiledLoader
from featstore.compiled.opened import Compiled
from featstore.compiled.rolling import RollingLoader
from featstore.disk import Disk
from featstore.errors import SourceError
from featstore.manifest import MANIFEST_NAME
from featstore.packing.packing import pack
from featstore.pipeline import Sampler, check_repeatable, epoch_of
from featstore.store import Store
from featstore.trace import Trace


def train_loader(
    dataset: Any, sampler: Sampler, *, memory: int | str = "1GiB", disk: int | str | None = None, device_memory: int | str = 0,
    path: str | os.PathLike[str] | None = None, name: str = "train", fresh: bool = False, epochs: int = 1, reuse: bool = False,
    residency: str = "min", **loader: Any,
) -> CompiledLoader | RollingLoader:  # fmt: skip
    """A loader of the sampler's mini-batches with the rows of their nodes.

    Args:
        dataset: a store or its path; or features (or a PyG ``Data``/``HeteroData``) as :func:`featstore.pack` takes them, which
            are packed into ``path`` first.
        sampler: mini-batches as :meth:`featstore.Trace.record` takes them: an iterable that can be gone through more than once,
            or a function of the epoch's number. It should not fetch features itself.
        memory, disk, device_memory, residency: as for :func:`featstore.compile_trace`.
        path: of the store that is made of ``dataset``; one that is there already is used.
        name: of the compiled trace.
        fresh: sample anew for every epoch, while the one before trains; the loader then has no end. Else the ``epochs`` that were
            sampled at first are gone through again and again.
        epochs: of the trace.
        reuse: use the compiled trace of that name if there is one. It is the caller's word that the sampler is the same.
        loader: options of :class:`featstore.compiled.loader.CompiledLoader`.

    Raises what :func:`featstore.pack`, :meth:`featstore.Trace.record` and :func:`featstore.compile_trace` raise.
    """
    if device_memory not in (0, "0") and loader.get("device") is None:
        raise SourceError("device_memory= keeps rows on a device: say on which, with device=")
    if fresh or epochs > 1:
        check_repeatable(sampler)
    store = _store_of(dataset, path)
    if fresh:
        options: dict[str, Any] = {
            "memory": memory,
            "disk": disk,
            "device_memory": device_memory,
            "residency": residency,
        }
        return RollingLoader(store, lambda number: epoch_of(sampler, number), name=name, loader=loader, **options)
    packs = packs_directory(store)
    if not (reuse and (packs / name / MANIFEST_NAME).exists()):
        Disk().mkdir(packs)
        with Trace.record(_epochs(sampler, epochs), packs / f"{name}.trace", overwrite=True) as trace:
            compile_trace(
                store,
                trace,
                name,
                memory=memory,
                disk=disk,
                device_memory=device_memory,
                residency=residency,
                overwrite=True,
            )
        Disk().rmtree(packs / f"{name}.trace")
    return Compiled(store, name).loader(**loader)


def _store_of(dataset: Any, path: str | os.PathLike[str] | None) -> Store:
    if isinstance(dataset, Store):
        return dataset
    if isinstance(dataset, str | os.PathLike) and (Path(dataset) / "featstore.json").exists():
        return Store(dataset)
    if path is None:
        raise SourceError("dataset is no store: give path=, where to pack it")
    return Store(path) if (Path(path) / "featstore.json").exists() else pack(path, dataset)


def _epochs(sampler: Sampler, epochs: int) -> Iterator[Any]:
    for number in range(epochs):
        yield from epoch_of(sampler, number)
