"""A rank's side: mini-batches come from the owner, through shared memory; and the way to it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from featstore.base.passed_errors import decode_error
from featstore.base.process import OneProcess
from featstore.base.state import position_of
from featstore.base.threads import close_apart, closed_later
from featstore.errors import ArgumentError, ClosedError, DeviceError, FeatstoreError, WaitTimeoutError
from featstore.hosts.places import WIRE_PATIENCE
from featstore.loaders.batch import Batch
from featstore.loaders.host.line import MEET_SECONDS, Line, Pulse, line_to, pair
from featstore.loaders.host.place import Place, fingerprint
from featstore.loaders.host.service import HostService, error_of
from featstore.loaders.host.slots import SharedSlots
from featstore.loaders.modes import Mode
from featstore.loaders.report import LoaderReport

_OWNER_GONE = (
    "local rank 0, which reads for the ranks of this host, has died: see why there, and begin all ranks again"
)
_OWNER_CLOSED = "local rank 0, which reads for the ranks of this host, has closed its loader"


class HostMode(OneProcess, Mode):
    """Mini-batches that local rank 0 makes, whatever its mode is.

    ``rank``: of all ranks; ``options``: what has to be the same in all ranks of the host; ``memory_bytes``:
    of the host; ``per_step``: seeds of a step of all ranks. ``make``: called in local rank 0 alone, see
    :class:`featstore.loaders.host.service.HostService`. Raises ArgumentError where the ranks do not belong
    together, WaitTimeoutError where one does not come, ClosedError where one dies; what ``make`` raises, in
    every rank. Of several hosts PeerError where a rank of this one says nothing any more.
    """

    called = "the loader"

    def __init__(
        self, place: Place, rank: int, options: Mapping[str, Any], memory_bytes: int, tensors: bool,
        per_step: int, make: Callable[[tuple[int, ...], int], Mode],
    ) -> None:  # fmt: skip
        OneProcess.__init__(self)
        self._tensors, self._per_step, self._lock = tensors, per_step, threading.Lock()
        self._position: tuple[int, int, Mapping[str, Any] | None] = (0, 0, None)  # epoch, step, mode's state
        self._run = 0  # number of the iteration
        self._begins = 0  # with which mini-batch of the epoch, as the loop counts them
        self._alive: dict[int, None] = {}  # mini-batches whose arrays are there, and count
        self._others: deque[tuple[Any, ...]] = deque()  # heard while something else was waited for
        self._seconds, self._batches = {"wait": 0.0, "train": 0.0}, 0
        self._last_report: LoaderReport | None = None
        self._reports = 0  # that have been asked for
        self._file = -1  # the shared memory, until it is mapped
        self._whole_steps = 0  # of all ranks, of an iteration that failed
        self._ended = b""  # the error that tells why nothing comes any more
        self._has_met = False
        self._place = place
        self._service: HostService | None = None  # of local rank 0
        self._pulse: Pulse | None = None
        alike = fingerprint(options)
        closed_later()
        with ExitStack() as opened:
            if place.local_rank == 0:
                own, self._line = pair()
                opened.callback(self._line.close)
                opened.callback(own.close)
                self._service = service = HostService(place, rank, alike, memory_bytes, own, make)
                opened.callback(service.close)
                dropped = weakref.finalize(self, _close_dropped, service, os.getpid())  # threads keep it
                dropped.atexit = False
                opened.callback(dropped.detach)
            else:
                # of several hosts it opens their store first, and waits for them all
                opening_seconds = WIRE_PATIENCE * (place.timeout_seconds or 0.0)
                self._line = line_to(place.address, place.check_beside, opening_seconds)
                opened.callback(self._line.close)
                self._line.say("hello", place.local_rank, rank, alike)
            self._heard("met", seconds=2 * MEET_SECONDS)  # for it to meet the others, and hear who they are
            self._has_met = True
            if place.timeout_seconds is not None and place.local_rank:
                self._pulse = Pulse(self._line, place.timeout_seconds)
                opened.callback(weakref.finalize(self, self._pulse.end))
            _, slot_bytes, self._template = self._heard("welcome")
            if self._file < 0:  # the system had none to give
                raise DeviceError(errno.EMFILE, "shared memory", None, "have a descriptor of")
            self._slots = SharedSlots(self._file, slot_bytes)
            # Who ends without having closed, says so as well; who is killed does not.
            opened.callback(weakref.finalize(self, _say_close, self._line, os.getpid()))
            self._opened = opened.pop_all()

    # What is heard.

    def _heard(self, *kinds: str, seconds: float | None = None) -> tuple[Any, ...]:
        """What comes with the next message of one of these kinds. Raises what ends everything, and
        WaitTimeoutError where ``seconds`` are given."""
        for number, earlier in enumerate(self._others):
            if earlier[0] in kinds:
                del self._others[number]
                return earlier
        while True:
            if self._ended:
                raise decode_error(self._ended)
            message, descriptors = self._hear(seconds)
            if descriptors:
                self._file = descriptors[0]
            if message is None:
                self._ended = self._ended or error_of(self._place.dead(0, _OWNER_GONE))
            elif message[0] == "failed":
                self._ended = message[1]
            elif message[0] == "closed":
                self._last_report = message[1]
                self._ended = error_of(ClosedError(_OWNER_CLOSED))
            elif message[0] in kinds:
                return message
            elif message[0] != "here":
                self._others.append(message)

    def _hear(self, seconds: float | None) -> tuple[tuple[Any, ...] | None, list[int]]:
        if self._pulse is None:
            if seconds is None or self._has_met:
                return self._line.hear(seconds)
            return self._place.hear(self._line, seconds)
        try:
            return self._pulse.hear()
        except WaitTimeoutError:
            error = self._place.silent(0)
            self._ended = error_of(error)
            raise error from None

    # Going through it.

    def begin(self, epoch: int, step: int, *, handed: int | None = None) -> None:
        self._begins = step

    def epoch(self) -> Generator[Batch]:
        epoch, step, at = self._position
        self._break_off()
        # Of iterations before: nothing comes after those that the loop still has. The newest is had by loops
        # that go on to the next epoch, until its first one comes; there is another place.
        self._say_kept(max(self._alive, default=0))
        run = self._run
        self._line.say("begin", run, epoch, step, at, self._begins, self._batches)
        over, had, before, self._whole_steps = False, 0, self._position, 2**62
        last = time.perf_counter()
        try:
            while True:
                found = self._next(run)
                now = time.perf_counter()
                self._seconds["wait"] += now - last
                if found is None:
                    over = True
                    self._position = epoch + 1, 0, None
                    return
                number, batch, at = found
                step, had, before = step + 1, had + 1, self._position
                self._position = epoch, step, at or {**self._template, "epoch": epoch, "next": step}
                self._batches += 1
                del found
                yield batch
                del batch
                last = time.perf_counter()
                self._seconds["train"] += last - now
                self._say_kept(number)
        except Exception:
            over, self.ahead = True, had > self._whole_steps
            if self.ahead:
                self._position = before
            raise
        finally:
            if not over and run == self._run:
                self._line.say("stop", run)

    def _say_kept(self, before: int) -> None:
        """Those mini-batches before this one that the loop still has stay with it."""
        for number in [one for one in list(self._alive) if one < before]:
            self._alive.pop(number, None)
            self._line.say("kept", number)

    def _next(self, run: int) -> tuple[int, Batch, Any] | None:
        """A mini-batch of this iteration, its number, and the mode's state after it; None at the end."""
        while True:
            self.check_process()
            if run != self._run:
                raise ClosedError("another iteration of this loader has begun, or its epoch or state was set")
            with self._lock:
                kind, its_run, *what = self._heard("batch", "end", "error")
                if kind == "batch":
                    number, slot, sizes, at = what
                    self._alive[number] = None
                    made = self._slots.read(slot, sizes, _Gone(self._line, self._alive, number))
            if its_run != run:
                made = None  # of one that was broken off
                continue
            if kind == "error":
                self._whole_steps = what[1]
                raise decode_error(what[0])
            if kind == "end":
                return None
            n_id, x, sample, attached = made
            batch = Batch(0, n_id, self._as_asked(x), sample)
            for name, values in attached.items():
                setattr(batch, name, self._as_asked(values))
            return number, batch, at

    def _as_asked(self, x: Any) -> Any:
        if not self._tensors:
            return x
        from featstore.base.tensors import as_tensor

        return {k: as_tensor(v) for k, v in x.items()} if isinstance(x, Mapping) else as_tensor(x)

    def _break_off(self) -> None:
        """An iteration under way ends."""
        self._line.say("stop", self._run)
        self._run += 1

    @property
    def ranks(self) -> int:
        """Of this host."""
        return self._place.ranks

    @property
    def per_step(self) -> int:
        return self._per_step

    def length(self) -> int:
        raise ArgumentError("ranks that share a loader do not know how many mini-batches an epoch has")

    def go_on(self, epoch: int, over: int, was: Mapping[str, Any] | None = None) -> tuple[int, int]:
        raise ArgumentError(
            "ranks that share a loader go on in the middle of an epoch with as many ranks, and seeds a "
            f"mini-batch, as before alone: begin the next one, set_epoch({epoch + 1})"
        )

    def set_epoch(self, epoch: int) -> None:
        self._break_off()
        self._position = epoch, 0, None

    def save_cache(self, name: str) -> None:
        if self._service is not None:  # which has them; on others it is called, too, as all ranks do the same
            self._service.save_cache(name)

    def state(self) -> dict[str, Any]:
        epoch, step, at = self._position
        return dict(at or {**self._template, "epoch": epoch, "next": step})

    def at(self, state: Mapping[str, Any], epoch: int, after: int) -> dict[str, Any]:
        # of mode partitions, which has more to say of a place, it goes by mega-batches
        return dict(state) if self._template["at"] else super().at(state, epoch, after)

    def load_state(self, state: Mapping[str, Any]) -> None:
        # In mode partitions its "next" counts mega-batches: that is the mode's own affair, and the same in
        # all ranks.
        epoch, step, _ = position_of(state, self._template["of"], tuple(self._template["at"]))
        self._break_off()
        self._position = epoch, step, dict(state)

    # What it does.

    def report(self) -> LoaderReport:
        """Of the host; mini-batches, waiting and training are this rank's."""
        report = self._report()
        return replace(report, batches=self._batches, seconds={**report.seconds, **self._seconds})

    def _report(self, seconds: float | None = None) -> LoaderReport:
        """The owner's; after its end the last one. Raises WaitTimeoutError where ``seconds`` are given."""
        self.check_process()
        with self._lock:
            if self._last_report is None:
                self._reports += 1
                self._line.say("report", self._reports)
                number = 0
                try:
                    while number != self._reports:  # those before were broken off
                        _, number, report = self._heard("report", seconds=seconds)
                except FeatstoreError:
                    if self._last_report is None:
                        raise
                else:
                    found: LoaderReport = report
                    return found
            return self._last_report

    def close(self) -> None:
        """Go; the owner ends it for all ranks of the host. An iteration that waits for a mini-batch, in this
        thread (a signal's handler closes) or another, is not waited for, nor is there a last report then."""
        if not self._lock.locked():
            with contextlib.suppress(FeatstoreError):
                self._last_report = self._report(MEET_SECONDS)
        self._ended = self._ended or error_of(
            ClosedError("the loader is closed; make another with store.loader()")
        )
        self._others.clear()
        self._opened.close()


class _Gone:
    """The arrays of a mini-batch are no more. It is called in whatever thread drops the last."""

    def __init__(self, line: Line, alive: dict[int, None], number: int) -> None:
        self._line, self._alive, self._number = line, alive, number

    def __call__(self) -> None:
        self._alive.pop(self._number, None)
        self._line.mention("gone", self._number)


def _close_dropped(service: HostService, process: int) -> None:
    if process == os.getpid():
        close_apart(service.close)


def _say_close(line: Line, process: int) -> None:
    if process == os.getpid():
        line.say("close")
