"""The owner's side: it goes through one loader for all ranks of its host and hands each its mini-batches.

Two threads: one goes through the loader and hands over; the other hears what the ranks say, and sees them
die. The owner's own rank is one like the others, with a line within the process.

*From ranks:* ``begin`` an epoch, from where; ``gone``, the arrays of a mini-batch are; ``kept``, those of one
are, though the loop has had the next; ``stop``, this epoch is broken off; ``report``; ``close``; over hosts
``there``, it is alive, and whether it waits: ``here`` is the answer.
*To ranks:* ``met``, all are there; ``welcome``, with the shared memory; ``batch``; ``end`` of the epoch;
``error``, which ends it; ``report``; ``closed``, with the last report; ``failed``, for good. What concerns an
epoch has the number that the rank gave it, and an error how many steps of all ranks came before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, TypeVar

from featstore.base.logs import LOG
from featstore.base.passed_errors import encode_error
from featstore.base.threads import Wake, Worker
from featstore.errors import ArgumentError, BudgetError, ClosedError, FeatstoreError, PeerError
from featstore.loaders.batch import Batch, attached_to
from featstore.loaders.host.line import Line, Meeting, heard_from
from featstore.loaders.host.place import Place, introduced
from featstore.loaders.host.rank import Begin, Rank
from featstore.loaders.host.slots import PER_RANK, Slots
from featstore.loaders.modes import Mode
from featstore.loaders.report import LoaderReport

_Got = TypeVar("_Got")
_SAVE_SECONDS = 10.0  # for ranks that have had their last mini-batch to say so
_LOOK_SECONDS = 0.005

_WHO = "local rank 0, which reads for the ranks of this host"


def _nothing() -> Generator[Batch]:
    yield from ()


def error_of(error: BaseException) -> bytes:
    """An error on its way to a rank. Where one that is not ours was raised is told here."""
    if not isinstance(error, FeatstoreError):
        LOG.error("%s passes an error on to the ranks of this host:", _WHO, exc_info=error)
    return encode_error(error, _WHO)


class HostService:
    """Made by local rank 0, which waits for the others; ``make`` is given their ranks, and the memory that is
    left beside places for mini-batches. ``own``: of the owner's own rank."""

    def __init__(
        self, place: Place, rank: int, options: Mapping[str, str], memory_bytes: int, own: Line,
        make: Callable[[tuple[int, ...], int], Mode],
    ) -> None:  # fmt: skip
        self._place = place
        meeting, lines = Meeting(place.address), list[Line]()
        self._made: Mode | None = None
        self._stands: int | None = 0  # at the begin of which epoch the mode does
        self._changed = Wake()
        self._closing = self._ended = False
        self._failed, self._between = False, True  # between steps: every rank has as many mini-batches
        self._last_report: LoaderReport | None = None
        self._lock = threading.RLock()  # of what is known of ranks; the two threads' own
        self._telling = threading.RLock()  # that it ends: one reason, to all of them
        self._hearing = Worker(self._hear, "featstore-host-hear")
        self._going = Worker(self._go, "featstore-host")
        try:
            with closing(meeting):
                for line in meeting.lines(place.ranks - 1, place.check_beside):
                    lines.append(line)  # one by one: those that have come are told of what goes wrong
            ranks, lines = introduced(lines, rank, options, place)
            self._slots = Slots(memory_bytes, place.ranks)
            self._ranks = [
                Rank(number, line, [self._slots.take() for _ in range(PER_RANK)])
                for number, line in enumerate([own, *lines])
            ]
        except BaseException as error:
            self._give_up(error)
            failed = error_of(error)
            for line in lines:
                line.say("failed", failed)
                line.close()
            raise
        try:
            self._hearing.start()  # they hear that this one is alive, while it makes the mode
            self._say_all("met")
            self._made = self._whole(make, ranks, self._slots.left_bytes)
            self._say_all("welcome", self._slots.bytes, self._mode.state(), descriptors=(self._slots.file,))
            self._going.start()
        except BaseException as error:
            self._fail(error)
            self.close()
            raise

    def save_cache(self, name: str) -> None:
        """Save which rows the buffers hold, once no rank is in an epoch, which that would end. Raises
        ArgumentError where one stays in it."""
        end = time.monotonic() + _SAVE_SECONDS
        while any(one.active is not None for one in self._ranks):
            if time.monotonic() > end:
                raise ArgumentError(
                    "save_cache() is for between epochs, and a rank that shares this loader is in one: go "
                    "through it to its end, or break it off, on all of them"
                )
            time.sleep(_LOOK_SECONDS)
        self._mode.save_cache(name)

    @property
    def _mode(self) -> Mode:
        assert self._made is not None
        return self._made

    def _say_all(self, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """To all ranks, unless they were told that nothing can go on."""
        with self._telling:
            for one in self._ranks if not self._failed else ():
                one.line.say(*message, descriptors=descriptors)

    def _whole(self, step: Callable[..., _Got], *arguments: Any) -> _Got:
        """Take a step within the memory that is left, which is told as a part of the whole."""
        try:
            return step(*arguments)
        except BudgetError as error:
            raise self._slots.whole(error) from error

    def _told(self, step: Callable[..., _Got], *arguments: Any) -> _Got:
        """The same of a step of the mode, which has shares of that memory."""

        def within() -> _Got:
            with self._mode.told_of_all():
                return step(*arguments)

        return self._whole(within)

    # Going through the epochs.

    def _go(self) -> None:
        try:
            while (start := self._all_begun()) is not None:
                self._go_through(start)
        except BaseException as error:
            self._fail(error)
        self._between = True

    def _all_begun(self) -> Begin | None:
        """Where all ranks begin; None when this is to end."""
        while not self._closing:
            with self._lock:
                waiting = [one for one in self._ranks if one.begun is not None]
                problem = self._problem_of(waiting)
                if problem is not None or len(waiting) == len(self._ranks):
                    for one in waiting:
                        one.begin()
                    if problem is None:
                        return self._ranks[0].active
                    for one in waiting:
                        one.end("error", error_of(problem), 0)
            self._changed.wait()
        return None

    def _problem_of(self, waiting: list[Rank]) -> FeatstoreError | None:
        """Why those who wait for their epoch to begin wait in vain."""
        closed = [one.number for one in self._ranks if one.closed]
        if closed and waiting:
            return ClosedError(
                f"local rank {closed[0]} has closed its loader: all ranks of a host go through as many epochs"
            )
        starts = [one.begun for one in waiting if one.begun is not None]
        if len(starts) < len(self._ranks) or len({(s.epoch, s.step, repr(s.at)) for s in starts}) == 1:
            return None
        where = ", ".join(f"{s.epoch} from mini-batch {s.step} on" for s in starts)
        return ArgumentError(
            f"the ranks of this host begin epochs {where}: call set_epoch() and load_state_dict() alike"
        )

    def _go_through(self, start: Begin) -> None:
        """One epoch, or what the ranks want of it."""
        batches: Generator[Batch] | None = None
        index = start.step * len(self._ranks)
        try:
            batches = self._told(self._from, start)
            while any(one.active for one in self._ranks):
                self._between = index % len(self._ranks) == 0
                if self._closing and self._between:
                    return
                batch = self._told(next, batches, None)
                if batch is None:
                    self._stands = start.epoch + 1
                    self._end_all("end")
                    return
                self._between = False  # before the owner's rank has its own, and may close for it
                self._hand(self._ranks[index % len(self._ranks)], batch)
                del batch
                index += 1
        except Exception as error:
            if not self._closing:
                self._end_all("error", error_of(error), index // len(self._ranks) - start.step)
        finally:
            if batches is not None:
                batches.close()

    def _end_all(self, kind: str, *what: Any) -> None:
        with self._lock:
            for one in self._ranks:
                one.end(kind, *what)

    def _from(self, start: Begin) -> Generator[Batch]:
        """The mini-batches of an epoch, of all ranks in turn."""
        mode = self._mode
        steps = None if mode.share is None else mode.share.steps
        if steps is not None and start.step >= steps:
            if start.step > steps:
                raise ArgumentError(f"the state points to mini-batch {start.step} of {steps} of an epoch")
            self._stands = None
            mode.set_epoch(start.epoch + 1)  # where all stand once there was nothing
            self._stands = start.epoch + 1
            return _nothing()
        if start.at is None:
            if self._stands != start.epoch:
                mode.set_epoch(start.epoch)
        elif steps is None:
            mode.load_state(start.at)
        else:  # mini-batches are counted over all ranks there
            mode.load_state({**start.at, "next": start.step * len(self._ranks)})
        self._stands = None
        mode.begin(start.epoch, start.next, handed=start.handed)
        return mode.epoch()

    def _hand(self, one: Rank, batch: Batch) -> None:
        """Give a rank its next mini-batch when it has a place for it; to one that has broken off, nothing."""
        while True:
            with self._lock:
                if one.active is None:
                    return
                run = one.active.run
                if not one.free and self._closing:  # the rest of a step goes beyond what is theirs
                    one.free.append(self._slots.take())
                if one.free:
                    slot = one.free.pop()
                    break
            self._changed.wait()
        try:
            batch = self._mode.whole(batch)
            sizes = self._slots.write(slot, (batch.n_id, batch.x, batch.sample, attached_to(batch)))
        except BaseException:
            one.free.append(slot)
            raise
        one.sent += 1
        one.held[one.sent] = slot
        at = self._mode.state() if self._mode.share is None else None
        one.line.say("batch", run, one.sent, slot, sizes, at)

    # Hearing.

    def _hear(self) -> None:
        try:
            while not self._ended:
                there = {one.line.socket.fileno(): one for one in self._ranks if not one.closed}
                if not there:
                    self._closing = True  # for whoever waits for epochs to begin
                    self._changed.set()
                if not there or -1 in there:
                    return
                before = time.monotonic()
                for number in heard_from([one.line.socket for one in there.values()], self._pulse_seconds):
                    self._hear_one(there[number])
                self._changed.set()
                if self._pulse_seconds is not None:
                    self._check_heard(before)
        except BaseException as error:
            self._fail(error)

    @property
    def _pulse_seconds(self) -> float | None:
        """How often it is looked who is alive; None where that is not asked."""
        return None if self._place.timeout_seconds is None else self._place.timeout_seconds / 5

    def _check_heard(self, before: float) -> None:
        """Give up who has said nothing for too long. ``before``: when it was listened last."""
        assert self._place.timeout_seconds is not None
        now = time.monotonic()
        for one in self._ranks[1:]:
            if now - before > self._place.timeout_seconds / 2:  # this process has stood still itself
                one.heard = now
            elif not one.closed and now - one.heard > self._place.timeout_seconds:
                self._fail(self._place.silent(one.number))
                with self._lock:
                    one.leave()

    def _hear_one(self, one: Rank) -> None:
        message, _ = one.line.hear()
        one.heard = time.monotonic()
        if message is None:
            # First why, and then that: else the other thread would say that it has closed.
            self._fail(self._place.dead(one.number, f"local rank {one.number} of this host has died"))
            with self._lock:
                one.leave()
        elif message[0] == "there":
            if message[1]:
                one.line.mention("here")
        elif message[0] == "report":
            with self._lock:
                report = self._last_report or self._mode.report()
            one.line.say("report", message[1], report)
        else:
            with self._lock:
                self._heed(one, *message)

    def _heed(self, one: Rank, kind: str, *what: Any) -> None:
        """Do as a rank says."""
        if kind == "begin":
            one.begun, one.active = Begin(*what), None
        elif kind == "stop":
            one.begun = None if one.begun and one.begun.run == what[0] else one.begun
            one.active = None if one.active and one.active.run == what[0] else one.active
        elif kind == "close":
            one.leave()
        elif kind == "kept" and what[0] in one.held:  # and not gone meanwhile
            one.kept[what[0]] = one.held.pop(what[0])
            one.free.append(self._slots.take())
        elif kind == "gone" and what[0] in one.held:
            one.free.append(one.held.pop(what[0]))
        elif kind == "gone" and what[0] in one.kept:
            self._slots.empty(one.kept.pop(what[0]))

    # Ending.

    def _fail(self, error: BaseException) -> None:
        """Nothing can go on: tell everybody why."""
        with self._telling:
            if self._failed or self._ended:
                return
            self._failed = self._closing = True
            self._give_up(error)
            failed = error_of(error)
            for one in reversed(self._ranks):  # the owner's own at last: it may end the process then
                if not one.closed:
                    one.line.say("failed", failed)
        self._changed.set()
        if self._made is not None:
            self._made.close()

    def _give_up(self, error: BaseException) -> None:
        """Tell other hosts of a rank that is gone, while local rank 0 may not look for long."""
        if isinstance(error, PeerError) and self._place.give_up is not None:
            self._place.give_up(error)

    def close(self) -> None:
        """End: ranks have as many mini-batches as any other, and are told. May be called more than once."""
        self._closing = True
        self._changed.set()
        if not self._between:  # a step is brought to its end
            self._going.end()
        if not self._failed:
            with self._lock:
                self._last_report = self._last_report or self._mode.report()
        if self._made is not None:
            self._made.close()
        self._going.end()
        with self._telling:
            if self._ended:
                return
            self._ended = True
            for one in self._ranks:
                if not one.closed and not self._failed:
                    one.line.say("closed", self._last_report)
                one.line.close()
        self._hearing.end()
        self._slots.close()
