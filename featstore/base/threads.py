"""Threads and waiting that survive an interrupt at any moment.

``KeyboardInterrupt`` can come between any two steps of Python code, also inside the standard library's: in
the middle of ``Event.set`` it leaves the event's lock taken for ever, an interrupted ``Thread.join`` (Python
3.11) takes the thread for ended, and one inside ``Thread.start`` leaves open whether the thread will run.
What is here uses only steps that are single to the interpreter: ``SimpleQueue.put`` and ``get``,
``list.pop``, and those of a lock of the interpreter's own.

``SimpleQueue.get`` with a time-out is not among them. Where it was woken up for something that another thread
has taken meanwhile, it waits for what is left of its time; where that is over, for ever (Python 3.11).

A forked child has none of its parent's threads: there, nothing waits for one.

The garbage collector, too, comes between any two steps, of any thread, and calls what is to be called of
objects that were dropped. One that waits there for a thread to end may wait for ever: the collector may have
come in the middle of the standard library's start of a thread, which holds a lock that the end of each thread
takes. So ``__del__`` of what has threads leaves its closing to a thread of its own (:func:`close_later`).
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from featstore.base.system import started
from featstore.errors import ClosedError

_PATIENCE_SECONDS = 0.2  # who waits looks this often whether there is anybody to wait for
_Outcome = tuple[BaseException | None, Any]
_Step = tuple[Callable[[], Any], "Reply | _Promise"]


class Wake:
    """Wakes up the one thread that waits, now or when it next waits; what was to be seen is looked at again
    after each :meth:`wait`. Of several that wait, one."""

    def __init__(self) -> None:
        self._nothing = threading.Lock()  # taken as long as there is nothing to be woken up for
        self._nothing.acquire()

    def set(self) -> None:
        # A lock that nobody has was not taken yet, so whoever takes it looks later than now.
        if self._nothing.locked():
            with suppress(RuntimeError):  # another has just done it
                self._nothing.release()

    def wait(self, timeout: float | None = None) -> None:
        """Return after a :meth:`set` since the last wait, or after so many seconds."""
        self._nothing.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


def before_pools_end(call: Callable[[], None]) -> None:
    """Have this called when the program ends, before thread pools are shut down, which may wait for it."""
    getattr(threading, "_register_atexit", atexit.register)(call)


class Permits:
    """A semaphore of ``count``; ``threading.Semaphore``, interrupted while it takes its lock, keeps it."""

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.release(count)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Take one, when there is one; with ``timeout=0``, or not ``blocking``, False where there is none
        now. It has no other time-outs."""
        assert timeout is None or timeout == 0
        try:
            self._free.get(blocking and timeout is None)
        except queue.Empty:
            return False
        return True

    def release(self, count: int = 1) -> None:
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class SafeCondition(threading.Condition):
    """A condition whose ``with`` takes and gives back its lock in one step each, as that over a bare lock
    does: between the steps of ``Condition.__enter__`` and ``__exit__`` an interrupt leaves it taken."""

    __enter__ = property(lambda self: self._lock.__enter__)  # type: ignore[assignment]
    __exit__ = property(lambda self: self._lock.__exit__)  # type: ignore[assignment]


class Worker:
    """A daemon thread that runs ``target`` once, and can be ended for sure: started or not, or interrupted
    while it was."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._permit = [target]  # to run; whoever pops it decides
        self._began, self._pid = False, os.getpid()
        self.ended = False  # it began, and its target has returned
        self._end = Wake()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run, unless :meth:`end` was called before. Raises DeviceError where there can be no more
        threads."""
        started(self._thread)

    def _run(self) -> None:
        self._began = True
        try:
            target = self._take_permit()
            if target is not None:
                target()
        finally:
            target = None
            self.ended = True
            self._end.set()

    def _take_permit(self) -> Callable[[], None] | None:
        try:
            return self._permit.pop()
        except IndexError:
            return None

    @property
    def here(self) -> bool:
        """Whether the thread is one of this process, and not of one that has forked it."""
        return self._pid == os.getpid()

    def end(self) -> None:
        """Wait until the target has returned; if it has not begun, it never will. An interrupt is raised
        after that."""
        if self._take_permit() is not None or not self._began or self._thread is threading.current_thread():
            return
        if not self.here:
            return
        interrupted: KeyboardInterrupt | None = None
        while not self.ended:
            try:
                self._end.wait(_PATIENCE_SECONDS)  # another may have been woken up instead
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
        self._thread.join()  # has nothing left to do


class Reply:
    """Where an error, or a result, goes that one thread waits for: ``outcome``, None until then."""

    def __init__(self) -> None:
        self.outcome: _Outcome | None = None
        self._there = Wake()

    def put(self, outcome: _Outcome) -> None:
        self.outcome = outcome
        self._there.set()

    def wait(self, seconds: float) -> _Outcome | None:
        """The outcome, waited for so long."""
        if self.outcome is None:
            self._there.wait(seconds)
        return self.outcome


class Runner:
    """A thread that takes steps for others, in their order, where no interrupt comes in. It ends with the
    last reference to this."""

    def __init__(self, name: str) -> None:
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._worker = Worker(partial(_take_steps, self._steps), name)
        self._worker.start()

    def run(self, step: Callable[[], Any]) -> Any:
        """What ``step`` returns or raises. Who is interrupted here does not learn it; the step is taken all
        the same.

        Raises ClosedError after :meth:`end`, and in a forked child.
        """
        self._check_here()
        reply = Reply()
        self._steps.put((step, reply))
        while (outcome := reply.wait(_PATIENCE_SECONDS)) is None:
            if self._worker.ended and reply.outcome is None:
                raise ClosedError("the thread that takes steps has ended")
        error, result = outcome
        if error is not None:
            raise error
        return result

    def submit(self, step: Callable[[], Any]) -> Future[Any]:
        """Have ``step`` taken; what it returns or raises, ClosedError where the thread ended before it, or
        that it was cancelled before it began.

        A process that ``step`` forks ends as it should. One forked by a thread of a ThreadPoolExecutor ends
        with an error: on its way out it waits for the pool's threads, of which it is one. Raises ClosedError
        in a forked child.
        """
        self._check_here()
        promise = _Promise()
        self._steps.put((partial(promise.take, step), promise))
        if self._worker.ended:  # nobody else will look
            _refuse(self._steps)
        return promise.future

    def _check_here(self) -> None:
        if not self._worker.here:
            raise ClosedError("the thread that takes steps stayed in the process that forked this one")

    def end(self) -> None:
        """Take the steps asked for so far, and no others."""
        self._steps.put(None)
        self._worker.end()
        if self._worker.ended:
            _refuse(self._steps)

    def __del__(self) -> None:
        if hasattr(self, "_steps"):
            self._steps.put(None)


def _take_steps(steps: queue.SimpleQueue[_Step | None]) -> None:
    while (item := steps.get()) is not None:
        step, reply = item
        try:
            reply.put((None, step()))
        except BaseException as error:
            reply.put((error, None))
        del item, step, reply
    _refuse(steps)


def _refuse(steps: queue.SimpleQueue[_Step | None]) -> None:
    """Tell those whose steps nobody will take."""
    with suppress(queue.Empty):
        while True:
            if (item := steps.get_nowait()) is not None:
                item[1].put((ClosedError("closed before this step was taken"), None))


class _Promise:
    """Where the outcome of a step goes that has a future."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def take(self, step: Callable[[], Any]) -> Any:
        return step() if self.future.set_running_or_notify_cancel() else None

    def put(self, outcome: _Outcome) -> None:
        error, result = outcome
        if self.future.cancelled():
            return
        if not self.future.running() and not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Closer:
    """The thread that closes what was dropped, of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.dropped: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.worker = Worker(self._close_all, "featstore-closer")
        self.worker.start()

    def _close_all(self) -> None:
        while (close := self.dropped.get()) is not None:
            try:
                close()
            except Exception:
                said = threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                threading.excepthook(said)
            del close

    def end(self) -> None:
        self.dropped.put(None)
        self.worker.end()


_closer: _Closer | None = None
_starting = threading.Lock()


def _renew_starting() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_starting)


def close_later(close: Callable[[], None]) -> None:
    """Have something closed by a thread that nobody waits for; for ``__del__`` (see the module's text). In a
    process that has no such thread, which then has none of those either that are to be waited for, it is
    closed at once."""
    closer = _closer
    if closer is None or closer.pid != os.getpid() or closer.worker.ended:
        close()
    else:
        closer.dropped.put(close)  # the one thing that may be interrupted by itself


def close_apart(close: Callable[[], None]) -> None:
    """The same for what waits for threads that may make something with threads themselves, and so wait for
    that thread: by one of its own."""
    close_later(lambda: Worker(close, "featstore-closing").start())


def closed_later() -> None:
    """Return when all that was dropped until now has been closed, its memory given back; from then on there
    is the thread that :func:`close_later` needs. To be called where what has threads is made. Raises
    DeviceError where there can be no more threads."""
    global _closer
    with _starting:
        if _closer is None or _closer.pid != os.getpid():
            _closer = _Closer()
        closer = _closer
    done = Reply()
    closer.dropped.put(partial(done.put, (None, None)))
    while done.wait(_PATIENCE_SECONDS) is None and not closer.worker.ended:
        pass


@atexit.register
def _end_closer() -> None:
    if _closer is not None and _closer.pid == os.getpid():
        _closer.end()


class _Pool(ThreadPoolExecutor):
    """A pool that goes on with the threads that it has where there can be no more of them. The standard
    library's has queued the work by then, and raises all the same: it would be done by the next thread that
    is free, of which whoever was refused knows nothing."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        # counts its idle threads: each of them gives one back
        self._idle_semaphore = Permits(0)  # type: ignore[assignment]

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                self._take_back()
                raise

    def _take_back(self) -> None:
        """What was queued last is not done."""
        waiting = [self._work_queue.get_nowait() for _ in range(self._work_queue.qsize())]
        for work in waiting[:-1]:
            self._work_queue.put(work)


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that an interrupted ``submit`` leaves usable; its threads' names begin with ``name``. Where the
    system has no room for as many it has fewer; where for none, ``submit`` raises RuntimeError, and nothing
    is done."""
    return _Pool(threads, name)


def shut_down(pool: ThreadPoolExecutor) -> None:
    """End a pool's threads and wait for them, unless one of them is asking (the last reference may be dropped
    in any thread)."""
    pool.shutdown(wait=threading.current_thread() not in pool._threads)
