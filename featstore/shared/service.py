"""The owner's side of a shared buffer: one thread that speaks with all clients and waits for none of them.

The thread sleeps until a socket has something to say, a read has ended or slots were given back. Each
client's conversation is a generator that yields the memory it wants to be filled next, so that it reads like
a dialogue and never blocks.

*Requests.* A request is of one table; who wants rows of several asks for one table after the other. It is
wanted now, or asked ahead. Wanted ones get their slots in the order in which those of a table were wanted;
when their rows are there, the client is told the slots, and they are pinned until it has copied.
Requests asked ahead are begun when no wanted one of their table waits, with at most half of its slots
(:data:`AHEAD_SHARE`); their tickets are given up, the youngest first, where a wanted one lacks slots or room,
and the client is told so when it wants the rows.

*No deadlock.* A wanted request waits only for reads under way, for wanted ones of its table before it, and
for clients in the middle of a copy, who wait for nothing before they give back what they hold; a client that
dies is a closed socket, and what it held is released. A request has at most ``batch_rows`` ids of its table,
which fit the table's slots.

*Room.* What is known of requests takes memory, :data:`BYTES_PER_ID` for each id. Where it is used up, the
socket of who wants more is not read from until there is room; ids that are asked ahead are let go.

*Limits.* A client that is stopped (SIGSTOP) in the middle of a copy keeps its slots until it goes on or is
killed. The thread needs Python's lock, so an owner that computes in Python delays its clients by some
milliseconds.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from featstore.base.passed_errors import encode_error
from featstore.base.system import asking, started
from featstore.shared import protocol
from featstore.shared.about import About
from featstore.shared.door import Door
from featstore.shared.guests import Asked, Guest, Session
from featstore.shared.protocol import ANSWER_BYTES, HEADER, NONCE_BYTES, PROOF_BYTES
from featstore.tiers.buffer import FeatureBuffer

ROOM_BATCHES = 4  # requests of the largest size that there is room for
AHEAD_SHARE = 0.5  # of the slots
_TURN = 16  # receives from one client before the next has its turn
_SCRATCH_BYTES = 64 * 1024


class Service:
    """Serves the rows of feature buffers, one for each table of ``about``, which lie in the file ``memory``,
    to clients; see the module's text."""

    def __init__(self, buffers: Sequence[FeatureBuffer], memory: int, key: bytes, about: About) -> None:
        self._buffers, self._memory, self._key, self._about = buffers, memory, key, about
        self._batch_rows = [table.batch_rows for table in about.tables.values()]
        self._room: int = ROOM_BATCHES * max(self._batch_rows)  # in ids
        # ids with slots, by table; above that, none ahead, unless all rows of the table have slots
        self._pinned = [0 for _ in buffers]
        self._ahead_max = [
            int(AHEAD_SHARE * buffer.slots) if buffer.slots < table.rows else self._room
            for buffer, table in zip(buffers, about.tables.values(), strict=True)
        ]
        self._guests: set[Guest] = set()
        self._held: deque[Guest] = deque()  # not listened to until there is room
        self._wanted: deque[Asked] = deque()  # without slots
        self._begun: list[Asked] = []  # wanted, their rows on their way
        self._ahead: list[Asked] = []  # not wanted yet, the oldest first
        self._stop = False
        self.error: BaseException | None = None  # what has ended the thread before its time
        self._bell_lock = threading.Lock()
        with protocol.forking, asking("the shared buffer", "make the sockets of"):
            self._selector = selectors.DefaultSelector()
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._door = Door(self._selector)
        self.address = self._door.address
        protocol.register(self)
        self._door.open()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for buffer in buffers:
            buffer.on_change = self._ring
        self._thread = started(threading.Thread(target=self._serve, name="featstore-shared", daemon=True))

    # The loop.

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _serve(self) -> None:
        try:
            while not self._stop:
                ready = self._selector.select(self._door.patience_seconds())
                self._door.reopen()
                for key, events in ready:
                    if key.fileobj is self._door.socket:
                        self._let_in()
                    elif key.fileobj == self._bell:
                        os.eventfd_read(self._bell)
                    else:
                        self._attend(key.data, events)
                for stranger in self._door.overstayed():
                    self._see_off(stranger)
                self._advance()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._door.close()
            for guest in list(self._guests):
                self._see_off(guest)

    def _let_in(self) -> None:
        with protocol.forking:
            connection = self._door.accept(self._see_off)
            if connection is None:
                return
            guest = Guest(connection, self._selector)
            self._guests.add(guest)
        self._door.meet(guest)
        connection.setblocking(False)
        guest.session = self._talk(guest)
        try:
            self._go_on(guest)
        except OSError:  # the system does not let this process listen to so many
            self._see_off(guest)

    def _attend(self, guest: Guest, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            guest.flush()
        if not events & selectors.EVENT_READ:
            return
        for _ in range(_TURN):
            if guest.gone or guest.wants is None:
                return
            try:
                got = guest.socket.recv_into(guest.wants)
            except BlockingIOError:
                return
            except OSError:
                got = 0
            if got == 0:
                self._see_off(guest)
                return
            guest.wants = guest.wants[got:]
            if len(guest.wants) == 0:
                self._go_on(guest)

    def _go_on(self, guest: Guest) -> None:
        """Let a client's session go on to where it wants something."""
        assert guest.session is not None
        for wants in guest.session:
            if wants is None or len(wants):
                guest.wants = wants
                if wants is None and guest not in self._held:
                    self._held.append(guest)
                guest.listen()
                return
        self._see_off(guest)  # it has broken the rules, or could not prove that it knows the key

    def _see_off(self, guest: Guest) -> None:
        """A client is gone: so is what it asked for."""
        if guest.gone:
            return
        guest.gone = True
        self._door.know(guest)
        guest.ignore()
        if guest in self._held:
            self._held.remove(guest)
        if guest.session is not None:
            guest.session.close()
        protocol.hang_up(guest.socket)
        self._guests.discard(guest)  # last: a child forked before closes its copy
        for asked in list(guest.asked.values()):
            self._forget(asked)

    # What clients say.

    def _talk(self, guest: Guest) -> Session:
        """A client's session; it ends where the client breaks the rules."""
        nonce = protocol.new_nonce()
        guest.say(nonce)
        answer = bytearray(ANSWER_BYTES)
        yield memoryview(answer)
        if not protocol.proves(bytes(answer[:PROOF_BYTES]), self._key, b"client", nonce):
            guest.answer(protocol.REFUSED)
            return
        self._door.know(guest)
        self._welcome(guest, bytes(answer[-NONCE_BYTES:]))
        header = bytearray(HEADER.size)
        while True:
            yield memoryview(header)
            kind, table, number, count = HEADER.unpack(header)
            if kind in (protocol.ASK, protocol.AHEAD, protocol.HOLDS):
                if table >= len(self._buffers) or count > self._batch_rows[table] or number in guest.asked:
                    return
                yield from self._take_ids(guest, Asked(guest, table, number, count), kind)
            elif kind == protocol.WANT:
                if not self._want(guest, number):
                    return
            elif kind == protocol.RELEASE:
                if number in guest.asked:
                    self._forget(guest.asked[number])
            elif kind == protocol.STATS:
                text = json.dumps([asdict(buffer.stats()) for buffer in self._buffers]).encode()
                guest.answer(protocol.ANSWER_STATS, 0, np.frombuffer(text, np.uint8))
            else:
                return

    def _welcome(self, guest: Guest, nonce: bytes) -> None:
        """Let a client have the rows. The first message is short, and the first in a socket that nothing else
        is in."""
        about = self._about.encode()
        header = HEADER.pack(protocol.WELCOME, 0, 0, len(about))
        proof = protocol.proof(self._key, b"owner", nonce)
        try:
            socket.send_fds(guest.socket, [header, proof], [self._memory])
        except OSError:
            guest.outgoing.clear()  # as in Guest.flush
        else:
            guest.say(about)

    def _take_ids(self, guest: Guest, asked: Asked, kind: int) -> Session:
        """Receive a request, where there is room for it."""
        ahead, count = kind == protocol.AHEAD, asked.count
        while not self._has_room(guest, count, not ahead):
            if ahead:  # it will be asked for again
                scratch, left = memoryview(bytearray(min(_SCRATCH_BYTES, 8 * count))), 8 * count
                while left:
                    yield scratch[:left]
                    left -= min(left, len(scratch))
                return
            yield None
        guest.asked[asked.number] = asked
        self._room -= count
        asked.ids = ids = np.empty(count, np.int64)
        yield ids.view(np.uint8).data
        if kind == protocol.HOLDS:
            self._say_held(asked, ids)
        else:
            (self._ahead if ahead else self._wanted).append(asked)

    def _say_held(self, asked: Asked, ids: NDArray[np.int64]) -> None:
        """Tell a client which rows are there."""
        try:
            held = self._buffers[asked.table].holds(ids)
        except Exception as error:
            self._say_error(asked, error)
            return
        asked.guest.answer(protocol.ANSWER_HELD, asked.number, held)
        self._forget(asked)

    def _has_room(self, guest: Guest, count: int, wanted: bool) -> bool:
        """Whether there is room for a request; what others asked ahead makes room for a wanted one."""
        if self._held and self._held[0] is not guest:
            return False
        while wanted and self._room < count and self._ahead:
            self._forget(self._ahead[-1])
        return self._room >= count

    def _want(self, guest: Guest, number: int) -> bool:
        """What was asked ahead is wanted now; False where it already was."""
        asked = guest.asked.get(number)
        if asked is None:
            guest.answer(protocol.AGAIN, number)
            return True
        if asked not in self._ahead:
            return False
        self._ahead.remove(asked)
        if asked.begun:
            self._begun.append(asked)
        else:
            self._wanted.append(asked)
        return True

    # What becomes of requests.

    def _advance(self) -> None:
        """Do what can be done now."""
        self._begin()
        self._answer()
        while self._held:
            guest = self._held[0]
            self._go_on(guest)
            if guest.wants is None and not guest.gone:
                return
            if not guest.gone:
                self._held.popleft()

    def _begin(self) -> None:
        """Give slots to requests that have none."""
        short: set[int] = (
            set()
        )  # tables: who came later must not overtake, or a large one would wait for ever
        for asked in list(self._wanted):
            if asked.table not in short:
                if self._begin_wanted(asked):
                    self._wanted.remove(asked)
                    self._begun.append(asked)
                else:
                    short.add(asked.table)
        for asked in self._ahead:
            full = self._pinned[asked.table] + asked.count > self._ahead_max[asked.table]
            if not asked.begun and asked.table not in short and (full or not self._try_begin(asked)):
                short.add(asked.table)

    def _begin_wanted(self, asked: Asked) -> bool:
        """Claim slots for a request that is wanted, also those of what was asked ahead; False where it has to
        wait."""
        while not self._try_begin(asked):
            holding = [one for one in self._ahead if one.table == asked.table and one.ticket is not None]
            if not holding:
                return False
            self._forget(holding[-1])
        return True

    def _try_begin(self, asked: Asked) -> bool:
        """Claim slots for a request; False where it would have to wait for them."""
        assert asked.ids is not None
        try:
            asked.ticket = self._buffers[asked.table].begin(asked.ids, timeout=0)
            asked.ticket.hand_over()  # its client decides when it is released
            asked.missed = sum(len(read.ids) for read in asked.ticket.reads)
        except TimeoutError:
            return False
        except Exception as error:
            asked.error = error
        else:
            self._pinned[asked.table] += asked.count
        asked.ids = None
        return True

    def _answer(self) -> None:
        """Tell those whose rows are there, or cannot be read."""
        for asked in list(self._begun):
            try:
                slots = asked.result()
            except TimeoutError:
                continue
            except Exception as error:
                self._say_error(asked, error)
            else:
                self._begun.remove(asked)
                asked.guest.answer(protocol.ANSWER_SLOTS, asked.number, slots, asked.missed)

    def _say_error(self, asked: Asked, error: BaseException) -> None:
        """Tell a client what went wrong, which ends its request."""
        text = np.frombuffer(encode_error(error, "the owner of the shared buffer"), np.uint8)
        asked.guest.answer(protocol.ANSWER_ERROR, asked.number, text)
        self._forget(asked)

    def _forget(self, asked: Asked) -> None:
        """A request is over: its slots and its room are free."""
        del asked.guest.asked[asked.number]
        self._room += asked.count
        for waiting in (self._wanted, self._begun, self._ahead):
            if asked in waiting:
                waiting.remove(asked)
        if asked.ticket is not None:
            self._pinned[asked.table] -= asked.count
            asked.ticket.release()

    # Ending.

    def forked(self) -> None:
        """In a new child: the sockets are the parent's, and nobody serves them here."""
        self._bell_lock = threading.Lock()
        self._door.close()
        for guest in self._guests:
            guest.socket.close()
        self._close_selector()

    def _close_selector(self) -> None:
        for buffer in self._buffers:
            buffer.on_change = None
        self._selector.close()
        with self._bell_lock:  # reads that end may ring it
            bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)

    def close(self) -> None:
        """Let all clients go. May be called more than once."""
        self._stop = True
        self._ring()
        self._thread.join()
        self._close_selector()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
