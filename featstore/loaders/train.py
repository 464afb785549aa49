"""One line from a data set and a sampler to a training loop: record, compile, load (DiskGNN's interface,
section 6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featstore.arguments import as_batches, as_choice, as_count, as_flag, as_path
from featstore.base.system import is_there
from featstore.compile.budget import parse_disk
from featstore.compile.build import compile_trace
from featstore.compile.forecast import CompileForecast
from featstore.errors import SourceError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.options import check_loader_options
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.prefetch import Sampler, check_repeatable, epoch_of
from featstore.loaders.ranks import warn_of_ranks
from featstore.loaders.rolling import RollingLoader
from featstore.packing.packing import pack
from featstore.storage.disk import Disk
from featstore.storage.manifest import MANIFEST_NAME
from featstore.storage.packs import (
    TRACES,
    check_pack_name,
    packs_directory,
    packs_to_write,
    preparing,
    remove_trace,
)
from featstore.storage.store import OpenStore
from featstore.trace.trace import Trace
from featstore.units import parse_bytes


def train_loader(
    dataset: Any, sampler: Sampler, *, memory: int | str = "1GiB", disk: int | str | None = None,
    device_memory: int | str = 0, path: str | os.PathLike[str] | None = None, name: str = "train",
    fresh: bool = False, epochs: int = 1, reuse: bool = False, residency: str = "min", **loader: Any,
) -> CompiledLoader | RollingLoader:  # fmt: skip
    """A loader of the sampler's mini-batches with the rows of their nodes.

    Args:
        dataset: a store or its path; or features (or a PyG ``Data``/``HeteroData``) as :func:`featstore.pack`
            takes them, which are packed into ``path`` first.
        sampler: mini-batches as :meth:`featstore.Trace.record` takes them: an iterable that can be gone
            through more than once, or a function of the epoch's number. Each epoch's number is passed on to
            what has a ``set_epoch``, as by :class:`featstore.OnlineLoader`. It should not fetch features
            itself.
        memory, disk, device_memory, residency: as for :func:`featstore.compile_trace`.
        path: of the store that is made of ``dataset``; one that is there already is used.
        name: of the compiled trace; with ``fresh``, of the two that take turns (``NAME-0``, ``NAME-1``). One
            loader has a name at a time; each process of a training on several devices needs one of its own.
        fresh: sample anew for every epoch, while the one before trains; the loader then has no end. Else the
            ``epochs`` that were sampled at first are gone through again and again.
        epochs: of the trace.
        reuse: use the compiled trace of that name if there is one. It is the caller's word that the sampler
            is the same.
        loader: options of :class:`featstore.loaders.compiled.loader.CompiledLoader`.

    Raises StoreLockedError where another loader has the name, FormatError for a name that is none, and what
    :func:`featstore.pack`, :meth:`featstore.Trace.record` and :func:`featstore.compile_trace` raise.
    """
    epochs, fresh, reuse = as_count(epochs, "epochs"), as_flag(fresh, "fresh"), as_flag(reuse, "reuse")
    if not reuse or sampler is not None:
        as_batches(sampler, "sampler")
    check_pack_name(name)
    check_loader_options(CompiledLoader, loader)
    if (
        not (isinstance(device_memory, int | str) and device_memory in (0, "0"))
        and loader.get("device") is None
    ):
        raise SourceError("device_memory= keeps rows on a device: say on which, with device=")
    parse_bytes(memory, "memory")
    as_choice(residency, "residency", ("min", "fixed"))
    if fresh or epochs > 1:
        check_repeatable(sampler)
    if not fresh:
        warn_of_ranks("a train_loader", sampler)
    store = _store_of(dataset, path)
    parse_disk(disk, store)
    if fresh:
        options: dict[str, Any] = {
            "memory": memory,
            "disk": disk,
            "device_memory": device_memory,
            "residency": residency,
        }
        return RollingLoader(store, sampler, name=name, loader=loader, **options)
    compiled_once(
        store, sampler, name, epochs=epochs, reuse=reuse, memory=memory, disk=disk,
        device_memory=device_memory, residency=residency,
    )  # fmt: skip
    return CompiledLoader(CompiledTrace(store, name), **loader)


def compiled_once(
    store: OpenStore, sampler: Sampler, name: str, *, epochs: int = 1, reuse: bool = False, **options: Any
) -> None:
    """Record the sampler's first epochs and compile them under ``name``, unless ``reuse`` finds that there.
    ``options``: of :func:`featstore.compile_trace`. Raises StoreLockedError where another loader has the
    name."""
    if not (reuse and is_there(packs_directory(store) / name / MANIFEST_NAME)):
        _compile(store, sampler, name, epochs, **options)


def forecast_once(store: OpenStore, sampler: Sampler, name: str, **options: Any) -> CompileForecast:
    """What :func:`compiled_once` would make of one epoch; nothing of it stays."""
    made = _compile(store, sampler, name, 1, dry_run=True, **options)
    assert isinstance(made, CompileForecast)
    return made


def _compile(
    store: OpenStore, sampler: Sampler, name: str, epochs: int, **options: Any
) -> Path | CompileForecast:  # fmt: skip
    packs, door = packs_to_write(store), Disk()
    door.mkdir(packs)
    lock = preparing(packs, name)
    try:
        with Trace.record(_epochs(sampler, epochs), packs / f"{name}{TRACES}", overwrite=True) as trace:
            made = compile_trace(store, trace, name, overwrite=True, **options)
        remove_trace(packs / f"{name}{TRACES}", door)
        return made
    finally:
        lock.release(remove=True)


def _store_of(dataset: Any, path: str | os.PathLike[str] | None) -> OpenStore:
    if isinstance(dataset, OpenStore):
        return dataset
    if isinstance(dataset, str | os.PathLike) and is_there(Path(dataset) / MANIFEST_NAME):
        return OpenStore(dataset)
    if path is None:
        raise SourceError("dataset is no store: give path=, where to pack it")
    path = as_path(path, "path")
    return OpenStore(path if is_there(Path(path) / MANIFEST_NAME) else pack(path, dataset))


def _epochs(sampler: Sampler, epochs: int) -> Iterator[Any]:
    for number in range(epochs):
        yield from epoch_of(sampler, number)
