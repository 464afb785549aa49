"""Rolling episodes: fresh mini-batches, packed beside the training on those before.

A compiled trace that is trained on epoch after epoch repeats its neighbours, as DiskGNN does. Here a trace
covers one episode, and while one episode trains, the next is compiled and packed by a thread of its own, and
the one after that sampled by another; the training loop sees one endless iterator. Two packed episodes exist
at once, so each has half of the disk limit, and the memory is divided between training and preparing. An
episode's files are removed when the next one has begun, before those of the one after it are written.

What is sampled for episode k is a function of k alone, so a loop that was stopped anywhere goes on with the
same mini-batches.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from featstore.arguments import as_batches, as_mapping, check_options, options_of
from featstore.base.environment import MEMORY
from featstore.base.state import position_of, state_of
from featstore.base.system import submitted
from featstore.base.threads import Runner, before_pools_end, thread_pool
from featstore.compile.budget import parse_disk
from featstore.compile.build import compile_trace
from featstore.errors import ArgumentError, BudgetError, ClosedError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.options import check_loader_options
from featstore.loaders.compiled.trace import CompiledTrace
from featstore.loaders.prefetch import LoaderBase, Sampler, check_repeatable, epoch_of
from featstore.loaders.report import NOTHING_YET, LoaderReport
from featstore.loaders.whole import tells_ids
from featstore.reader.options import as_memory
from featstore.storage.disk import Disk
from featstore.storage.packs import (
    EPISODES,
    TRACES,
    Episode,
    check_pack_name,
    packs_to_write,
    remove_episodes,
    remove_pack,
    remove_trace,
    rolling,
)
from featstore.storage.store import OpenStore, as_store
from featstore.trace.told_ids import TOLD
from featstore.trace.trace import Trace

TRAIN_SHARE = 0.7  # of the memory; preparing has the rest, unless one of them needs more
_preparing: weakref.WeakSet[RollingLoader] = weakref.WeakSet()


def _stop_all() -> None:
    for one in list(_preparing):
        one._stopping = True


before_pools_end(_stop_all)  # which wait for what is prepared


class RollingLoader(LoaderBase):
    """Mini-batches without end, every episode from a fresh sample. A context manager.

    Args:
        store: the base store.
        episode: makes the mini-batches of episode k = 0, 1, ...: any iterables that
            :meth:`featstore.Trace.record` takes; or one iterable that can be gone through once an episode.
            Called in another thread, two episodes ahead. What has a ``set_epoch`` is told k by it, as an
            :meth:`featstore.Store.loader` does.
        name: of the compiled traces, ``NAME-0`` and ``NAME-1``, and of their traces beside them. It is held,
            by a lock on the file ``NAME.rolling``, until the loader is closed: each process and each loader
            needs one of its own.
        memory: budget of training and preparing together, bytes or a size: training has seven tenths, or what
            the first episode needs.
        disk: limit on the rows of both episodes together, as for :func:`featstore.compile_trace`.
        loader: options of :class:`featstore.loaders.compiled.loader.CompiledLoader`.
        tell: told how far an episode is that the loop waits for, as functions for ``progress=`` are.
        others: options of :func:`featstore.compile_trace`.

    What an episode's preparation raises, the iterator raises when that episode's turn comes. Raises
    StoreLockedError where another loader has the name, StoreExistsError where something else has those of the
    episodes, ArgumentError for a name that is none.
    """

    def __init__(
        self, store: OpenStore, episode: Sampler, *, name: str = "rolling", memory: int | str = MEMORY,
        disk: int | str | None = None, loader: Mapping[str, Any] | None = None,
        tell: Callable[..., None] | None = None, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._tell, self._awaited = tell, False
        self._stopping = False  # the program ends
        check_pack_name(name)
        as_batches(episode, "episode")
        check_repeatable(episode)
        self._store, self._episode, self._name = as_store(store), episode, name
        own = ("memory", "disk", "resume", "dry_run", "read_times")
        check_options(others, [o for o in options_of(compile_trace) if o not in own], "a rolling loader")
        loader = {} if loader is None else as_mapping(loader, "loader", "options of a CompiledLoader")
        check_loader_options(CompiledLoader, loader)
        total = as_memory(memory)
        train_bytes = max(2, int(total * TRAIN_SHARE))
        limit = parse_disk(disk, store)
        self._memory_bytes, self._divided = total, False  # once an episode has been compiled
        self._parts = {"memory": max(1, total - train_bytes), "train_memory": train_bytes}
        self._options: dict[str, Any] = {
            "disk": None if limit is None else limit // 2, "overwrite": True, "progress": self._unless_closed,
            "read_times": 1, **others,
        }  # fmt: skip
        self._loader_options = dict(loader)
        self._packs = packs_to_write(store)
        Disk().mkdir(self._packs)
        self._lock = rolling(self._packs, name)
        try:  # no pool: a DataLoader may fork its workers there
            self._sampler = Runner("featstore-rolling-sampler")
        except BaseException:
            self._lock.release(remove=True)
            raise
        self._worker = thread_pool(1, "featstore-rolling")
        self._traces: dict[int, Future[Trace]] = {}  # recorded, or being so, and not compiled yet
        self._episodes: dict[int, Future[CompiledTrace]] = {}  # the one that trains, and the one after it
        self._loader: CompiledLoader | None = None
        self._given_back, self._closing = False, threading.RLock()
        _preparing.add(self)
        self._done = NOTHING_YET  # of the episodes before the one that trains
        self._at = (0, 0)  # episode, mini-batches of it handed out
        self._remote: list[tuple[int, int]] = []  # rows of other hosts, and bytes, of each episode
        self.sampling_seconds: list[float] = []  # of each episode, in the background
        self.preparing_seconds: list[float] = []  # of each episode once it is sampled, in the background
        self.waiting_seconds: list[float] = []  # for each episode, in the loop

    def _record(self, number: int) -> Trace:
        """Sample and record an episode."""
        begin = time.perf_counter()
        path = self._packs / f"{self._pack(number)}{TRACES}"
        told = TOLD if tells_ids(self._episode) else None
        how: dict[str, Any] = {"overwrite": True, "progress": self._unless_closed, "fingerprint": told}
        trace = Trace.record(self._sampled(number), path, **how)
        self.sampling_seconds.append(time.perf_counter() - begin)
        return trace

    def _recorded(self, number: int) -> Future[Trace]:
        if number not in self._traces:
            self._traces[number] = self._sampler.submit(partial(self._record, number))
        return self._traces[number]

    def _prepare(self, number: int) -> CompiledTrace:
        """Compile and pack an episode, once it is recorded; the next is recorded beside it."""
        try:
            trace = self._recorded(number).result()
        finally:
            self._traces.pop(number, None)  # none, where it could not begin
        with trace:
            self._unless_closed()
            begin, name, door = time.perf_counter(), self._pack(number), Disk()
            self._recorded(number + 1)
            remove_pack(self._packs / name, door)  # the episode before the one that trains: room for two
            self._compile(trace, name)
        remove_trace(trace.path, door)
        self.preparing_seconds.append(time.perf_counter() - begin)
        compiled = CompiledTrace(self._store, name)
        self._remote.append(compiled.remote())
        return compiled

    def _pack(self, number: int) -> Episode:
        return Episode(f"{self._name}{EPISODES[number % 2]}")

    def _compile(self, trace: Trace, name: str) -> None:
        """Compile an episode. If preparing or training needs more than its part of the memory, the other has
        the rest; not once an episode is there to train, which has its part already. Raises BudgetError with
        a memory of both that works, the smallest where it is the first episode."""
        needs: dict[str, int] = {}
        while True:
            try:
                compile_trace(self._store, trace, name, **{**self._parts, **self._options})
                self._divided = True
                return
            except BudgetError as error:
                short = next((p for p, given in self._parts.items() if given == error.given_bytes), None)
                if short is None:  # of a part that the caller has said, or of something else
                    raise
                needs[short] = error.needed_bytes
                (other,) = (part for part in self._parts if part != short)
                if self._divided:
                    share = TRAIN_SHARE if short == "train_memory" else 1 - TRAIN_SHARE
                    needed = max(int(needs[short] / share) + 1, needs[short] + self._parts[other])
                    raise BudgetError(needed, self._memory_bytes, error.what) from None
                if other in needs and sum(needs.values()) > self._memory_bytes:
                    raise BudgetError(sum(needs.values()), self._memory_bytes, error.what) from None
                # What the other needs is said where it has nothing left, before anything is done.
                left = max(1, self._memory_bytes - needs[short])
                self._parts = {short: needs[short], other: left - (left == needs[short])}

    def _sampled(self, number: int) -> Iterator[Any]:
        for batch in epoch_of(self._episode, number):
            self._unless_closed()
            yield batch

    def _unless_closed(self, *told: Any) -> None:
        if self._closed or self._stopping:
            raise ClosedError("the loader is closed; make another with store.loader()")
        if told and self._awaited and self._tell is not None:
            self._tell(*told)

    def __iter__(self) -> Iterator[Any]:
        """From where the loader is: the begin, a state that was loaded, or the mini-batch after the last one
        handed out. There is one iteration at a time: a new one ends the one before."""
        while True:
            yield from self.episode()

    def episode(self) -> Iterator[Any]:
        """The same, to the end of the episode."""
        number, done = self._at
        loader = self._open(number, done)
        try:
            for batch in loader if done < len(loader) else ():
                done += 1
                self._at = number, done
                yield batch
                del batch
            self._at = number + 1, 0
        finally:
            loader.close()
            if self.here:
                self._done = self._done.plus(loader.report())
                if self._loader is loader:  # another iteration may have begun meanwhile
                    self._loader = None

    def _open(self, number: int, done: int) -> CompiledLoader:
        """The loader of an episode, which waits for it to be prepared; has the one after it prepared."""
        self.check_open()
        if self._loader is not None:
            self._loader.close()
        for earlier in [k for k in self._episodes if k < number]:
            self._episodes.pop(earlier).result().close()
        begin, self._awaited = time.perf_counter(), True
        try:
            compiled = self._prepared(number).result()
        except Exception:
            self._episodes.pop(number, None)  # to be tried again
            raise
        finally:
            self._awaited = False
        self.waiting_seconds.append(time.perf_counter() - begin)
        loader = self._loader = CompiledLoader(compiled, **self._loader_options)
        if done > len(loader):
            raise ArgumentError(f"the state points to mini-batch {done} of {len(loader)} of an epoch")
        if 0 < done < len(loader):
            loader.load_state(state_of(loader.identity, 0, done))
        self._prepared(number + 1)
        return loader

    def _prepared(self, number: int) -> Future[CompiledTrace]:
        if number not in self._episodes:
            self._episodes[number] = submitted(self._worker, self._prepare, number)
        return self._episodes[number]

    def report(self) -> LoaderReport:
        """What has been measured in all episodes so far."""
        loader = self._loader  # another thread goes on to the next
        report = self._done if loader is None else self._done.plus(loader.report())
        preparing = {
            "sample": sum(self.sampling_seconds), "prepare": sum(self.preparing_seconds),
            "episode wait": sum(self.waiting_seconds),
        }  # fmt: skip
        rows, size = (sum(one) for one in zip((0, 0), *self._remote, strict=True))
        seconds = {**report.seconds, **preparing}
        return replace(report, seconds=seconds, remote_rows=rows, remote_bytes=size)

    def state(self) -> dict[str, Any]:
        """Where the loader is; its epochs are episodes."""
        return state_of({"store": self._store.uuid}, *self._at)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        epoch, after, _ = position_of(state, {"store": self._store.uuid})
        self.seek(epoch, after)

    def seek(self, epoch: int, after: int = 0, *, anew: bool = False) -> None:
        """Stand in an episode, after so many of its mini-batches: the next iteration begins there. What was
        prepared of others is let go, and with ``anew`` all of it: episodes are not what they were."""
        self.check_open()
        if self._loader is not None:
            self._loader.close()
        for number in [k for k in self._episodes if anew or k not in (epoch, epoch + 1)]:
            other = self._episodes.pop(number)
            if not other.cancel() and other.exception() is None:
                other.result().close()
        for number in [k for k in list(self._traces) if anew or k not in (epoch, epoch + 1)]:
            recorded = self._traces.pop(number)
            if not recorded.cancel() and recorded.exception() is None:
                recorded.result().close()
        self._at = epoch, after

    def close(self) -> None:
        """Stop preparing, and remove the episodes' files. May be called more than once."""
        self._closed = True
        if not self.here:
            return  # nothing here is a forked child's to remove
        with self._closing:  # another may be closing it, or have been interrupted
            if not self._given_back:
                self._give_back()

    def _give_back(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._worker.shutdown(wait=True, cancel_futures=True)  # it may wait for what is sampled
        for recorded in self._traces.values():
            recorded.cancel()
        self._sampler.end()
        made: list[Future[Any]] = [*self._episodes.values(), *self._traces.values()]
        for one in made:
            if not one.cancelled() and one.exception() is None:
                one.result().close()
        try:
            remove_episodes(self._packs, self._name, Disk())
        except BaseException:
            self._lock.release()  # what is left, the next one of this name removes, or `featstore gc`
            self._given_back = True
            raise
        self._lock.release(remove=True)
        self._given_back = True
