"""What loaders share: a thread that goes ahead of the training loop, a bounded queue between them, memory
that is used again, and the time that each stage takes.

A mini-batch's rows take *room* from when they are assembled until the loop has taken the next mini-batch. So
the mini-batches that exist at once, the one that the loop works on among them, never take more than the
loader was given.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Self

from featstore.base.process import OneProcess
from featstore.base.threads import Wake, Worker
from featstore.errors import ClosedError, SourceError
from featstore.loaders.batch import device_tensors

if TYPE_CHECKING:
    from featstore.base.transfers import Transfer
    from featstore.engine.request import Request

_END = object()

#: Mini-batches, again and again; or what makes those of epoch 0, 1, ...
Sampler = Iterable[Any] | Callable[[int], Iterable[Any]]


#: Where a loader of mini-batches keeps what may want to know the epoch: torch's, PyG's, and what wraps them.
_PARTS = ("loader", "dataset", "sampler", "batch_sampler", "node_sampler", "link_sampler", "collate_fn")
_PARTS_DEPTH = 5


def epoch_of(sampler: Sampler, number: int) -> Iterable[Any]:
    """The mini-batches of an epoch, which have been told its number; see :func:`pass_epoch`. PyG's loaders
    are iterable and callable: they are iterated."""
    batches = sampler if isinstance(sampler, Iterable) else sampler(number)
    pass_epoch(batches, number)
    return batches


def pass_epoch(batches: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of all that has one: ``batches``, and what it is made of (a loader's data
    set, samplers, collate function, and theirs). What is outside is told last, so that it may tell its parts
    something else.

    Without this, fixed seeds would have the same neighbours in every epoch.
    """
    for part in parts_of(batches):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def parts_of(batches: Any) -> list[Any]:
    """What mini-batches come from, each object once, the innermost first and ``batches`` itself last."""
    found: list[Any] = []
    _collect(batches, _PARTS_DEPTH, [], found)
    return found


def _collect(one: Any, depth: int, seen: list[Any], found: list[Any]) -> None:
    one = getattr(one, "__self__", one)  # of a method: the object
    if depth == 0 or any(one is other for other in seen):
        return
    seen.append(one)
    for name in _PARTS:
        part = getattr(one, name, None)
        if part is not None:
            _collect(part, depth - 1, seen, found)
    found.append(one)


def check_repeatable(sampler: Sampler) -> None:
    """Raise SourceError for what can be gone through only once."""
    if isinstance(sampler, Iterator):
        raise SourceError(
            "an iterator gives its mini-batches only once: give an iterable, or a function of the "
            "epoch's number"
        )


class LoaderBase(OneProcess, ABC):
    """What all loaders are: context managers that belong to the process that made them, until they are
    closed."""

    called = "the loader"

    @abstractmethod
    def close(self) -> None:
        """Give everything back; an iteration under way ends with ClosedError. May be called more than
        once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class PrefetchingLoader(LoaderBase):
    """A loader with a thread that goes ahead of the loop: one iteration at a time."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self.report_stages = stages
        self._lock = threading.RLock()
        self._prefetch: Prefetch | None = None  # the iteration under way
        self._transfer: Transfer | None = None  # to a device, where mini-batches go to one
        self._next = 0  # mini-batches handed out in it

    @abstractmethod
    def _begin_prefetch(self) -> Prefetch:
        """Begin an iteration, within :meth:`_alone`."""

    def _taken(self, made: Any) -> Any:
        """What the loop gets of what was made, which counts as handed out from here on; within the lock."""
        self._next += 1
        return made

    def _prefetched(self, prefetch: Prefetch) -> None:
        """An iteration has come to its end."""

    def __iter__(self) -> Iterator[Any]:
        prefetch = self._begin_prefetch()
        prefetch.transfer = self._transfer
        try:
            prefetch.start()  # in here, so that an interrupt finds the threads with someone who ends them
            last = time.perf_counter()
            for batch in prefetch:
                now = time.perf_counter()
                self.report_stages.add("wait", now - last)
                with self._lock:
                    prefetch.check()
                    batch = self._taken(batch)
                yield batch
                del batch
                # first: in a forked child, a thread of the parent may have what else is asked
                self.check_process()
                last = time.perf_counter()
                self.report_stages.add("train", last - now)
            self._prefetched(prefetch)
        finally:
            prefetch.close()

    @contextmanager
    def _alone(self, because: str) -> Iterator[None]:
        """What an iteration works on is the caller's: one under way has ended, and is told why."""
        self.check_process()
        with self._lock:
            self.check_open()
            if self._prefetch is not None:
                self._prefetch.close(because)
            yield


class Prefetch(ABC):
    """One iteration of a loader: the thread that goes ahead, and the bounded queue between it and the loop.

    Args:
        check_process: raises ClosedError in any process but the loader's.
        stages: where waiting is counted.
        room: how many mini-batches (or other units) may exist at once.
        held: the units of the last mini-batch of the iteration before, which the loop may have until it has
            taken the first.
    """

    def __init__(
        self, check_process: Callable[[], None], stages: Stages, room: int, held: int, name: str
    ) -> None:
        self._check_process, self._stages, self._pid = check_process, stages, os.getpid()
        self._ready: queue.SimpleQueue[tuple[Any, int, BaseException | None, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free, self._held = room - held, held
        self._changed = Wake()  # there is room, reads have ended, or the prefetch was stopped
        self._stop = ""  # why the prefetch was stopped
        self.transfer: Transfer | None = None  # what its thread has a device do goes on beside the loop's
        self._worker = Worker(self._run, name)

    # The loop's side.

    def start(self) -> None:
        """Go ahead."""
        if not self._stop:
            self._worker.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.check()
            batch, units, error, mark = self._ready.get()
            self.check()
            if error is not None:
                raise error
            if batch is _END:
                return
            if self.transfer is not None:
                self.transfer.hand(mark, device_tensors(batch))
            with self._lock:
                self._free += self._held  # of the mini-batch before, which the loop drops now
                self._held = units
            self._changed.set()
            yield batch
            del batch

    def check(self) -> None:
        """Raise ClosedError where there is nothing to wait for."""
        self._check_process()
        if self.stopping:
            raise ClosedError(self._stop)

    @property
    def stopping(self) -> bool:
        """Whether it was stopped; its threads may not have ended yet."""
        return bool(self._stop)

    def close(self, because: str = "the loader is closed; make another with store.loader()") -> None:
        """Stop, also in the middle; nothing is under way afterwards. Whoever still waits for a mini-batch is
        told why there is none."""
        self._stop = self._stop or because
        if os.getpid() != self._pid:
            return  # the threads, and what their locks guard, stayed in the other process
        self._changed.set()
        interrupted: KeyboardInterrupt | None = None
        for worker in self._workers():
            try:
                worker.end()
            except KeyboardInterrupt as error:
                interrupted = error
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put((None, 0, ClosedError(self._stop), None))
        if interrupted is not None:
            raise interrupted

    def _workers(self) -> list[Worker]:
        return [self._worker]

    # The thread's side.

    @abstractmethod
    def _go(self) -> None:
        """Make mini-batches and hand them over, in the thread that goes ahead, until there are no more or the
        prefetch is stopped."""

    def _run(self) -> None:
        try:
            with nullcontext() if self.transfer is None else self.transfer.within():
                self._go()
            self._ready.put((_END, 0, None, None))
        except BaseException as error:
            self._ready.put((None, 0, error, None))

    def _hand_over(self, batch: Any, units: int = 1) -> None:
        mark = None if self.transfer is None else self.transfer.mark()
        self._ready.put((batch, units, None, mark))

    def _try_room(self, units: int = 1) -> bool:
        """Take room for a mini-batch if there is any."""
        with self._lock:
            if self._free < units:
                return False
            self._free -= units
            return True

    def _take_room(self, instead: Callable[[], bool]) -> bool:
        """Wait for room for another mini-batch; False where ``instead`` says that there is something else to
        do, or after a stop."""
        begin = time.perf_counter()
        while not self._stop:
            if self._try_room():
                self._stages.add("room wait", time.perf_counter() - begin)
                return True
            if instead():
                return False
            self._changed.wait()
        return False


class Stages:
    """Seconds by stage and bytes by where they came from; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._bytes: Counter[str] = Counter()
        self._batches = 0
        self._under_way = 0
        self._since = 0.0

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds
            self._batches += stage == "wait"

    def count(self, source: str, byte_count: int) -> None:
        """Count bytes of rows by where they came from."""
        with self._lock:
            self._bytes[source] += byte_count

    def reading(self, request: Request) -> None:
        """A read of rows has begun; its end is noticed by itself."""
        self.read_begins()
        request.add_done_callback(lambda _: self.read_ends())

    def read_begins(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1

    def read_ends(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._seconds["read"] += time.perf_counter() - self._since

    def snapshot(self) -> tuple[int, dict[str, float], dict[str, int]]:
        """(mini-batches, seconds by stage, bytes by source) so far."""
        with self._lock:
            seconds = {k: round(v, 6) for k, v in sorted(self._seconds.items())}
            return self._batches, seconds, dict(self._bytes)
