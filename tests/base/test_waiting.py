"""Threads and waiting: nothing is lost, whatever comes when."""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest
from processes import in_child

import featstore
from featstore.base.threads import Runner, Wake, Worker, close_later, closed_later
from featstore.errors import ClosedError

LIMIT_SECONDS = 20.0


def within_limit(target: Any) -> None:
    """Run in another thread, and fail where it takes too long."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "it hangs"


def test_no_wake_is_lost() -> None:
    wake, seen = Wake(), [0]
    goal = 20_000

    def count() -> None:
        for _ in range(goal // 4):
            with lock:
                seen[0] += 1
            wake.set()

    lock = threading.Lock()
    setters = [threading.Thread(target=count) for _ in range(4)]

    def wait() -> None:
        while seen[0] < goal:
            wake.wait()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    for one in setters:
        one.start()
    for one in setters:
        one.join()
    waiter.join(LIMIT_SECONDS)
    assert not waiter.is_alive()


def test_none_of_several_that_wait_does_for_longer_than_it_said() -> None:
    """What one was woken up for another may have taken, and its time be over when it is heard."""
    wake, last, over = Wake(), dict[int, float](), threading.Event()

    def wait(number: int) -> None:
        while not over.is_set():
            last[number] = time.monotonic()
            wake.wait(0.0005)

    def keep_setting() -> None:
        while not over.is_set():
            wake.set()

    threads = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(16)]
    threads.append(threading.Thread(target=keep_setting, daemon=True))
    for one in threads:
        one.start()
    time.sleep(2)
    over.set()  # and from now on nobody wakes anybody up
    for one in threads:
        one.join(LIMIT_SECONDS)
    assert not any(one.is_alive() for one in threads)
    assert len(last) == 16


def test_a_wake_from_before_the_wait_counts_once() -> None:
    wake = Wake()
    wake.set()
    wake.set()
    wake.wait()
    begin = time.monotonic()
    wake.wait(timeout=0.05)
    assert time.monotonic() - begin >= 0.04


def test_a_worker_that_was_ended_first_never_runs() -> None:
    ran: list[int] = []
    worker = Worker(lambda: ran.append(1), "test")
    worker.end()
    worker.start()
    within_limit(worker.end)
    worker._thread.join(LIMIT_SECONDS)
    assert ran == []


def test_end_waits_and_may_be_called_again_and_by_the_worker_itself() -> None:
    go: queue.SimpleQueue[None] = queue.SimpleQueue()
    done: list[int] = []

    def work() -> None:
        go.get()
        worker.end()  # its own: nothing to wait for
        done.append(1)

    worker = Worker(work, "test")
    worker.start()
    assert not worker.ended
    threading.Timer(0.05, go.put, [None]).start()

    def end() -> None:
        worker.end()
        assert done == [1]
        worker.end()

    within_limit(end)
    assert worker.ended


def test_an_interrupt_while_waiting_for_the_end_is_raised_after_it() -> None:
    go: queue.SimpleQueue[None] = queue.SimpleQueue()
    done: list[int] = []

    def work() -> None:
        go.get()
        done.append(1)

    worker = Worker(work, "test")
    worker.start()
    while not worker._began:
        time.sleep(0.001)

    def interrupt(_: int, __: FrameType | None) -> None:
        go.put(None)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            worker.end()
        assert done == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupts_at_every_step_of_starting_and_ending_leave_nothing_running() -> None:
    """A tracer raises at the n-th line, call or return of ``start`` and ``end``, for each n there is."""
    import featstore.base.threads as module

    at = 0
    while True:
        at += 1
        steps, running = [0], [0]

        def work(running: list[int] = running) -> None:
            running[0] += 1
            running[0] -= 1

        def trace(frame: FrameType, event: str, argument: Any, steps: list[int] = steps, at: int = at) -> Any:
            if frame.f_code.co_filename != module.__file__:
                return None
            steps[0] += 1
            if steps[0] == at:
                raise KeyboardInterrupt
            return trace

        worker = Worker(work, "test")
        interrupted = False
        sys.settrace(trace)
        try:
            worker.start()
            worker.end()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        within_limit(worker.end)
        assert running[0] == 0
        if not interrupted:
            assert at > 10
            return


def test_a_runner_takes_steps_in_order_and_passes_errors_on() -> None:
    runner, order = Runner("test"), []
    assert [runner.run(lambda n=n: order.append(n) or n) for n in range(5)] == list(range(5))
    with pytest.raises(ZeroDivisionError):
        runner.run(lambda: 1 // 0)
    within_limit(runner.end)
    assert order == list(range(5))
    with pytest.raises(ClosedError):
        runner.run(lambda: 1)


def test_a_runner_that_nobody_has_ends_by_itself() -> None:
    runner = Runner("test-forgotten")
    assert runner.run(lambda: 1) == 1
    del runner
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(t.name == "test-forgotten" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_runner_settles_every_future() -> None:
    runner, go, ran = Runner("test"), threading.Event(), []
    first = runner.submit(lambda: go.wait(LIMIT_SECONDS))
    result, error = runner.submit(lambda: 5), runner.submit(lambda: 1 // 0)
    cancelled = runner.submit(lambda: ran.append(1))
    assert cancelled.cancel()
    go.set()
    assert first.result(LIMIT_SECONDS)
    assert result.result(LIMIT_SECONDS) == 5
    assert isinstance(error.exception(LIMIT_SECONDS), ZeroDivisionError)
    within_limit(runner.end)
    assert cancelled.cancelled()
    assert ran == []
    late = runner.submit(lambda: ran.append(1))
    assert isinstance(late.exception(LIMIT_SECONDS), ClosedError)
    assert ran == []


def test_a_runner_that_is_ended_while_it_is_asked_settles_every_future() -> None:
    def ask(runner: Runner, futures: list[Any]) -> None:
        futures += [runner.submit(int) for _ in range(50)]

    for _ in range(100):
        runner, futures = Runner("test"), []
        asker = threading.Thread(target=ask, args=(runner, futures))
        asker.start()
        within_limit(runner.end)
        asker.join()
        assert len(futures) == 50
        for one in futures:
            assert one.exception(LIMIT_SECONDS) is None or isinstance(one.exception(), ClosedError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_cannot_ask_its_parents_runner() -> None:
    runner = Runner("test")
    child = os.fork()
    if child == 0:
        try:
            runner.submit(int)
        except ClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    within_limit(runner.end)


INTERRUPTED = """
import faulthandler, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
faulthandler.dump_traceback_later(50, exit=True)
import threading
from featstore.base.threads import Permits, SafeCondition, thread_pool
kind = sys.argv[1]
lock = {"condition": SafeCondition, "semaphore": lambda: Permits(1), "plain": threading.Condition}.get(kind)
lock = lock and lock()
pool = {"pool": thread_pool, "plain pool": ThreadPoolExecutor}.get(kind)
pool = pool and pool(1, "pool")
taken, ran, wanted = 0, [], 0
class Interrupt(BaseException):
    pass
armed = False
def interrupt(*_):  # once; the timer goes on for one that came just before the lock was waited for
    global armed
    if armed:
        armed = False
        raise Interrupt
def take():
    global taken, wanted
    while True:
        if pool:
            wanted = len(ran)
            pool.submit(ran.append, None)
        else:
            with lock:
                taken += 1
if pool:
    pool.submit(int).result()  # its thread is there
signal.signal(signal.SIGALRM, interrupt)
end, interrupts = time.monotonic() + 1.5, 0
while time.monotonic() < end:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.00005 + interrupts % 97 * 1e-7, 0.01)
        take()
    except Interrupt:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
if pool:
    done = threading.Event()
    pool.submit(done.set)
    whole = done.wait(5)
elif kind == "semaphore":
    lock.release()  # one that was taken when the interrupt came is given back by nobody
    whole = lock.acquire(timeout=0)
else:  # another thread gets it
    got = []
    other = threading.Thread(target=lambda: got.append(lock.acquire(timeout=1)))
    other.start()
    other.join()
    whole = got[0]
assert interrupts > 500, interrupts
print("whole" if whole else "kept")
sys.stdout.flush()
import os
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["condition", "semaphore", "pool"])
def test_an_interrupt_leaves_no_lock_taken(kind: str) -> None:
    """That of the standard library is kept by the first that comes between two steps: ``plain``."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, kind], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "whole\n", done.stderr[-2000:]


def test_what_is_dropped_is_closed_where_nobody_waits(store: featstore.Store) -> None:
    """The garbage collector may come while the standard library starts a thread, and holds the lock that the
    end of each thread takes: a reader that it finds is closed all the same, and nothing hangs."""
    reader = store.reader(memory="64MiB")
    reader.submit([1, 2, 3]).result(10)  # its threads are there
    circle: list[Any] = [reader]
    circle.append(circle)
    dropped = weakref.ref(reader)
    del reader, circle

    def collect() -> None:
        with getattr(threading, "_shutdown_locks_lock", nullcontext()):  # Python 3.13 has none
            gc.collect()

    within_limit(collect)
    within_limit(closed_later)
    assert dropped() is None


def test_who_closes_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    closed_later()

    def fail() -> None:
        raise ValueError("no")

    closed: list[int] = []
    close_later(fail)
    close_later(lambda: closed.append(1))
    within_limit(closed_later)
    assert closed == [1]
    assert [str(one.exc_value) for one in said] == ["no"]


def test_a_forked_child_closes_at_once_until_it_has_a_thread() -> None:
    closed_later()

    def work() -> bool:
        closed: list[int] = []
        close_later(lambda: closed.append(1))
        at_once = closed == [1]
        closed_later()
        close_later(lambda: closed.append(2))
        closed_later()
        return at_once and closed == [1, 2]

    assert in_child(work) == 0


def test_what_is_dropped_at_the_end_is_closed() -> None:
    """Of a program that ends right after, too."""
    program = (
        "from featstore.base.threads import close_later, closed_later\n"
        "import time\n"
        "closed_later()\n"
        "close_later(lambda: (time.sleep(0.2), print('closed')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
