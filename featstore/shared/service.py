"""The owner's side of a shared buffer: one thread that speaks with all clients and waits for none of them.

The thread sleeps until a socket has something to say, a read has ended or slots were given back. Each
client's conversation is a generator that yields the memory it wants to be filled next, so that it reads like
a dialogue and never blocks.

*Requests.* A request is wanted now, or asked ahead. Wanted ones get their slots in the order in which they
were wanted; when their rows are there, the client is told the slots, and they are pinned until it has copied.
Requests asked ahead are begun when no wanted one waits, with at most half of the slots (:data:`AHEAD_SHARE`);
their tickets are given up, the youngest first, where a wanted one lacks slots or room, and the client is told
so when it wants the rows.

*No deadlock.* A wanted request waits only for reads under way, for wanted ones before it, and for clients in
the middle of a copy; a client that dies is a closed socket, and what it held is released. A request has at
most ``batch_rows`` ids, which fit the buffer.

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
from dataclasses import asdict
from typing import Any

import numpy as np

from featstore.base.system import asking, started
from featstore.shared import protocol
from featstore.shared.door import Door
from featstore.shared.guests import Asked, Guest, Session
from featstore.shared.protocol import ANSWER_BYTES, HEADER, NONCE_BYTES, PROOF_BYTES
from featstore.tiers.buffer import FeatureBuffer

ROOM_BATCHES = 4  # requests of the largest size that there is room for
AHEAD_SHARE = 0.5  # of the slots
_TURN = 16  # receives from one client before the next has its turn
_SCRATCH_BYTES = 64 * 1024


class Service:
    """Serves a feature buffer's rows, which lie in the file ``memory``, to clients; see the module's text."""

    def __init__(self, buffer: FeatureBuffer, memory: int, key: bytes, about: dict[str, Any]) -> None:
        self._buffer, self._memory, self._key, self._about = buffer, memory, key, about
        self._batch_rows: int = about["batch_rows"]
        self._room: int = ROOM_BATCHES * self._batch_rows  # in ids
        # ids with slots; above that, none ahead
        self._pinned, self._ahead_max = 0, int(AHEAD_SHARE * buffer.slots)
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
            guest.say(HEADER.pack(protocol.REFUSED, 0, 0))
            return
        self._door.know(guest)
        self._welcome(guest, bytes(answer[-NONCE_BYTES:]))
        header = bytearray(HEADER.size)
        while True:
            yield memoryview(header)
            kind, number, count = HEADER.unpack(header)
            if kind in (protocol.ASK, protocol.AHEAD):
                if count > self._batch_rows or number in guest.asked:
                    return
                yield from self._take_ids(guest, number, count, kind == protocol.ASK)
            elif kind == protocol.WANT:
                if not self._want(guest, number):
                    return
            elif kind == protocol.RELEASE:
                if number in guest.asked:
                    self._forget(guest.asked[number])
            elif kind == protocol.STATS:
                text = json.dumps(asdict(self._buffer.stats())).encode()
                guest.say(HEADER.pack(protocol.ANSWER_STATS, 0, len(text)), text)
            else:
                return

    def _welcome(self, guest: Guest, nonce: bytes) -> None:
        """Let a client have the rows. The message is short, and the first in a socket that nothing else is
        in."""
        body = protocol.proof(self._key, b"owner", nonce) + json.dumps(self._about).encode()
        try:
            socket.send_fds(guest.socket, [HEADER.pack(protocol.WELCOME, 0, len(body)), body], [self._memory])
        except OSError:
            guest.outgoing.clear()  # as in Guest.flush

    def _take_ids(self, guest: Guest, number: int, count: int, wanted: bool) -> Session:
        """Receive a request, where there is room for it."""
        while not self._has_room(guest, count, wanted):
            if not wanted:  # it will be asked for again
                scratch, left = memoryview(bytearray(min(_SCRATCH_BYTES, 8 * count))), 8 * count
                while left:
                    yield scratch[:left]
                    left -= min(left, len(scratch))
                return
            yield None
        asked = guest.asked[number] = Asked(guest, number, count)
        self._room -= count
        assert asked.ids is not None
        yield asked.ids.view(np.uint8).data
        (self._wanted if wanted else self._ahead).append(asked)

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
            guest.say(HEADER.pack(protocol.AGAIN, number, 0))
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
        while self._wanted:
            if self._try_begin(self._wanted[0]):
                self._begun.append(self._wanted.popleft())
                continue
            holding = [asked for asked in self._ahead if asked.ticket is not None]
            if not holding:
                return  # who came later must not overtake, or a large request would wait for ever
            self._forget(holding[-1])
        for asked in self._ahead:
            if not asked.begun and (
                self._pinned + asked.count > self._ahead_max or not self._try_begin(asked)
            ):
                return

    def _try_begin(self, asked: Asked) -> bool:
        """Claim slots for a request; False where it would have to wait for them."""
        assert asked.ids is not None
        try:
            asked.ticket = self._buffer.begin(asked.ids, timeout=0)
            asked.ticket.hand_over()  # its client decides when it is released
        except TimeoutError:
            return False
        except Exception as error:
            asked.error = error
        else:
            self._pinned += asked.count
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
                text = protocol.encode_error(error)
                asked.guest.say(HEADER.pack(protocol.ANSWER_ERROR, asked.number, len(text)), text)
                self._forget(asked)
            else:
                self._begun.remove(asked)
                asked.guest.say(
                    HEADER.pack(protocol.ANSWER_SLOTS, asked.number, len(slots)),
                    slots.view(np.uint8).data,
                )

    def _forget(self, asked: Asked) -> None:
        """A request is over: its slots and its room are free."""
        del asked.guest.asked[asked.number]
        self._room += asked.count
        for waiting in (self._wanted, self._begun, self._ahead):
            if asked in waiting:
                waiting.remove(asked)
        if asked.ticket is not None:
            self._pinned -= asked.count
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
        self._buffer.on_change = None
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
