"""Rolling episodes: fresh mini-batches, packed beside the training on those before.

A compiled trace that is trained on epoch after epoch repeats its neighbours, as DiskGNN does. Here a trace covers one episode, and
while one episode trains, the next is sampled, compiled and packed by a thread of its own; the training loop sees one endless
iterator. Two episodes exist at once, so each has half of the disk limit, and the memory is divided between training and preparing. An
episode's files are removed when the next one has begun, before those of the one after it are written.

What is sampled for episode k is a function of k alone, so a loop that was stopped anywhere goes on with the same mini-batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from featstore.compiled.budget import parse_disk
from featstore.compiled.build import compile_trace, packs_directory
from featstore.compiled.loader import CompiledLoader
from featstore.compiled.opened import Compiled
from featstore.disk import Disk
from featstore.errors import ClosedError, SourceError
from featstore.store import Store
from featstore.trace import Trace
from featstore.units import parse_bytes

_TRAIN_SHARE = 0.7  # of the memory; preparing has the rest


class RollingLoader:
    """Mini-batches without end, every episode from a fresh sample. A context manager.

    Args:
        store: the base store.
        episode: makes the mini-batches of episode k = 0, 1, ...: any iterables that :meth:`featstore.Trace.record` takes. Called in
            another thread, one episode ahead.
        name: of the compiled traces, ``NAME-0`` and ``NAME-1``, and of their traces beside them.
        memory: budget of training and preparing together, bytes or a size.
        disk: limit on the rows of both episodes together, as for :func:`featstore.compile_trace`.
        loader: options of :class:`featstore.compiled.loader.CompiledLoader`.
        others: options of :func:`featstore.compile_trace`.

    What an episode's preparation raises, the iterator raises when that episode's turn comes.
    """

    def __init__(
        self, store: Store, episode: Callable[[int], Iterable[Any]], *, name: str = "rolling", memory: int | str = "1GiB",
        disk: int | str | None = None, loader: Mapping[str, Any] | None = None, **others: Any,
    ) -> None:  # fmt: skip
        self._store, self._episode, self._name = store, episode, name
        total = parse_bytes(memory)
        train_bytes = int(total * _TRAIN_SHARE)
        limit = parse_disk(disk, store)
        self._options: dict[str, Any] = {
            "memory": total - train_bytes, "train_memory": train_bytes, "disk": None if limit is None else limit // 2,
            "overwrite": True, "progress": self._unless_closed, **others,
        }  # fmt: skip
        self._loader_options = dict(loader or {})
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="featstore-rolling")
        self._episodes: dict[int, Future[Compiled]] = {}  # the one that trains, and the one after it
        self._loader: CompiledLoader | None = None
        self._at = (0, 0)  # episode, mini-batches of it handed out
        self._pid = os.getpid()
        self._closed = False
        self.preparing_seconds: list[float] = []  # of each episode, in the background
        self.waiting_seconds: list[float] = []  # for each episode, in the loop

    def _prepare(self, number: int) -> Compiled:
        """Sample, record, compile and pack an episode."""
        begin = time.perf_counter()
        name = f"{self._name}-{number % 2}"
        door, folder = Disk(), packs_directory(self._store)
        door.mkdir(folder)
        door.rmtree(folder / name)  # the episode before the one that trains: there is room for two
        trace = Trace.record(self._sampled(number), folder / f"{name}.trace", overwrite=True)
        with trace:
            compile_trace(self._store, trace, name, **self._options)
        door.rmtree(trace.path)
        self.preparing_seconds.append(time.perf_counter() - begin)
        return Compiled(self._store, name)

    def _sampled(self, number: int) -> Iterator[Any]:
        for batch in self._episode(number):
            self._unless_closed()
            yield batch

    def _unless_closed(self, _: object = None) -> None:
        if self._closed:
            raise ClosedError("the loader is closed")

    def __iter__(self) -> Iterator[Any]:
        """From where the loader is: the begin, a state that was loaded, or the mini-batch after the last one handed out. There is one
        iteration at a time: a new one ends the one before."""
        while True:
            number, done = self._at
            loader = self._open(number, done)
            try:
                for batch in loader:
                    done += 1
                    self._at = (number, done) if done < len(loader) else (number + 1, 0)
                    yield batch
                    del batch
            finally:
                loader.close()

    def _open(self, number: int, done: int) -> CompiledLoader:
        """The loader of an episode, which waits for it to be prepared; has the one after it prepared."""
        self._unless_closed()
        if os.getpid() != self._pid:
            raise ClosedError("a loader belongs to the process that made it; make another one here")
        if self._loader is not None:
            self._loader.close()
        for earlier in [k for k in self._episodes if k < number]:
            self._episodes.pop(earlier).result().close()
        begin = time.perf_counter()
        try:
            compiled = self._prepared(number).result()
        except Exception:
            self._episodes.pop(number, None)  # to be tried again
            raise
        self.waiting_seconds.append(time.perf_counter() - begin)
        loader = self._loader = compiled.loader(**self._loader_options)
        if done:
            loader.load_state_dict({"compiled": compiled.pack.uuid, "round": 0, "next": done})
        self._prepared(number + 1)
        return loader

    def _prepared(self, number: int) -> Future[Compiled]:
        if number not in self._episodes:
            self._episodes[number] = self._worker.submit(self._prepare, number)
        return self._episodes[number]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, small enough for a checkpoint."""
        return {"base": self._store.uuid, "episode": self._at[0], "next": self._at[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; before the first iteration."""
        if state["base"] != self._store.uuid:
            raise SourceError(f"this state is of the store {state['base']}, not of {self._store.uuid}")
        if self._episodes:
            raise SourceError("load the state before the first mini-batch is asked for")
        self._at = int(state["episode"]), int(state["next"])

    def close(self) -> None:
        """Stop preparing, and remove the episodes' files. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # nothing here is a forked child's to remove
        if self._loader is not None:
            self._loader.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        for episode in self._episodes.values():
            if not episode.cancelled() and episode.exception() is None:
                episode.result().close()
        door = Disk()
        for turn in (0, 1):
            door.rmtree(packs_directory(self._store) / f"{self._name}-{turn}")
            door.rmtree(packs_directory(self._store) / f"{self._name}-{turn}.trace")

    def __enter__(self) -> RollingLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
