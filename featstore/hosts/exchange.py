"""The exchange of rows between hosts: a line to each other host, on which either asks and serves.

A line has two threads, one that sends and one that receives, so that neither waits for the other. Up to
:data:`featstore.hosts.line.PLACES` asks of a host are under way at once, and the host that is asked has so
many places to make the
answers in: no ask ever waits for memory there, so no circle of hosts can wait for each other.

A line that is idle says so a few times in ``timeout_seconds``. A host from which nothing was heard for that
long, which has not answered for that long, or whose connection is closed, is gone, and with it the exchange:
on this host everything asked for fails with PeerError, and the others are told which host it was. Hosts that
end say so, and serve on until all have.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.error_text import first_line, name_and_line
from featstore.base.process import OneProcess
from featstore.base.threads import Wake, Worker, before_pools_end
from featstore.engine.request import Request
from featstore.errors import ClosedError, FormatError, PeerError, SourceError
from featstore.hosts import messages as ms
from featstore.hosts.asks import AnswerPlace, Ask
from featstore.hosts.line import PLACES, POSTED, HostLine, Outgoing, Serve, ServeLists, received_bytes
from featstore.hosts.loaders import LoadersOfHosts
from featstore.hosts.wire import Wire

IDS_MAX = 1 << 16  # of an ask
_GRACE_SECONDS = 1.0  # for the reason to arrive why others have closed
_VERSION = 6
_LONG = 1024  # characters of what hosts compare, each
_started: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _leave_all() -> None:
    """Before the interpreter goes: a thread that came back from the network after that would end the process
    by SIGABRT, whatever its error and exit code were."""
    for exchange in list(_started):
        exchange.close("has ended without closing the store")


before_pools_end(_leave_all)  # after which rows that others ask for could not be read


class Exchange(OneProcess):
    """All lines of this host. It belongs to the process that made it.

    Args:
        wire: connects the hosts.
        about: what all hosts must have alike: JSON values by name.
        tables: how many tables there are.
        body_bytes, ids_max: of an answer and an ask, as this host has memory; the least of all hosts holds.
        timeout_seconds: after which a host that is not heard of is given up.

    Raises PeerError where a host does not come, SourceError where ``about`` differs.
    """

    called = "the exchange of rows between hosts"

    def __init__(
        self, wire: Wire, about: Mapping[str, Any], *, tables: int, body_bytes: int, ids_max: int,
        timeout_seconds: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wire, self.tables, self.timeout_seconds = wire, tables, timeout_seconds
        self.error: PeerError | None = None
        self.serve: Serve = _nobody
        self.serve_lists: ServeLists = _nobody_lists
        self._failing, self._counting = threading.Lock(), threading.Lock()
        self._changed = Wake()
        self._received = dict.fromkeys((ms.Kind.ASK, ms.Kind.PICK), (0, 0))
        self.loaders = LoadersOfHosts(self)
        peers = [host for host in range(wire.hosts) if host != wire.host]
        agreed = self._agree(peers, _shortly(about), body_bytes, ids_max)
        self.body_bytes, self.ids_max = agreed
        self.lines = {peer: HostLine(self, peer) for peer in peers}
        self._watch = Worker(self._watch_all, "featstore-watch-hosts")
        self._ending = False

    def _agree(
        self, peers: list[int], about: dict[str, Any], body_bytes: int, ids_max: int
    ) -> tuple[int, int]:
        mine = {"version": _VERSION, "body_bytes": body_bytes, "ids_max": ids_max, "about": about}
        text = ms.text_message(ms.Kind.HELLO, json.dumps(mine).encode())
        telling = [Worker(partial(self._tell, peer, text), f"featstore-tell-{peer}") for peer in peers]
        for worker in telling:  # who sends may have to wait for who receives
            worker.start()
        for peer in peers:
            theirs = self._hello(peer)
            if theirs.get("version") != _VERSION or theirs["about"] != about:
                _wait_for(telling, time.monotonic() + _GRACE_SECONDS)  # it learns why, too
                other = [n for n in about if theirs.get("about", {}).get(n) != about[n]] or ["version"]
                raise SourceError(
                    f"host {peer} (rank {self.wire.rank_of(peer)}) does not have what this host has "
                    f"({', '.join(other)} differ: here {about.get(other[0], _VERSION)!r}, there "
                    f"{theirs.get('about', {}).get(other[0], theirs.get('version'))!r}): give every host its "
                    "part of the same split, the same timeout_seconds=, and the same version of featstore"
                )
            body_bytes, ids_max = min(body_bytes, theirs["body_bytes"]), min(ids_max, theirs["ids_max"])
        _wait_for(telling)  # end() would keep one that has not begun from telling
        return body_bytes, ids_max

    def _tell(self, peer: int, text: NDArray[np.uint8]) -> None:
        """Say who this is. Who cannot be reached does not come either, which is told there."""
        with suppress(Exception):
            self.wire.send(peer, text)

    def _hello(self, peer: int) -> dict[str, Any]:
        raw = ms.message(ms.TEXT_BYTES_MAX)
        try:
            self.wire.take(self.wire.post(peer, raw))
            found = ms.parse_header(raw)
            if found.kind != ms.Kind.HELLO:
                raise FormatError("has begun with something else than who it is")
            body = ms.body_of(found, raw)
            said: dict[str, Any] = json.loads(body.tobytes())
            return said
        except FormatError as error:
            raise self.peer_error(peer, str(error)) from error
        except Exception as error:
            raise self.peer_error(peer, f"has not come ({first_line(error)})") from error

    def start(self, serve: Serve, serve_lists: ServeLists | None = None) -> None:
        """From now on rows are asked for and served, and neighbours, where each host has lists of its own."""
        self.serve = serve
        if serve_lists is not None:
            self.serve_lists = serve_lists
        _started.add(self)
        now = time.monotonic()
        for line in self.lines.values():
            line.heard = now
            for worker in line.workers:
                worker.start()
        self._watch.start()

    def ask(self, peer: int, ask: Ask) -> None:
        """Have what is asked for sent; the ask ends with it, or with an error."""
        self.lines[peer].ask(ask)

    # What is known.

    def received(self, kind: ms.Kind, rows: int, byte_count: int) -> None:
        with self._counting:
            before = self._received[kind]
            self._received[kind] = before[0] + rows, before[1] + byte_count

    def counted(self, kind: ms.Kind = ms.Kind.ASK) -> tuple[int, int]:
        """Rows that have come from other hosts, or nodes whose neighbours have (PICK), and their bytes."""
        return self._received[kind]

    @staticmethod
    def held_bytes(hosts: int, body_bytes: int, ids_max: int, tables: int) -> int:
        """Memory that the lines take."""
        room = received_bytes(body_bytes, ids_max, tables)
        place = body_bytes + 8 * ids_max
        return (hosts - 1) * (
            PLACES * (place + 8 * ids_max) + (POSTED + 1) * room + (PLACES + POSTED + 2) * ms.HEADER_BYTES
        )

    # Failing.

    def peer_error(self, host: int, what: str) -> PeerError:
        return PeerError(host, self.wire.rank_of(host), what)

    def lost(self, peer: int, error: Exception) -> None:
        """Something went wrong on the line to a host."""
        if self.error is not None or self.lines[peer].last:
            return
        if isinstance(error, FormatError):
            self.fail(self.peer_error(peer, str(error)))
            return
        # Who gives a host up closes all its lines, and says why on those that still work.
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.error is None and time.monotonic() < deadline:
            self._changed.wait(_GRACE_SECONDS / 20)
        self.fail(self.peer_error(peer, f"is gone ({first_line(error)})"))

    def told(self, peer: int, host: int, rank: int, text: bytes) -> None:
        """Another host has given up a rank of one, perhaps of itself."""
        said = text.decode(errors="replace")
        self.fail(PeerError(host, rank, said if host == peer else f"{said}, as host {peer} says"))

    def fail(self, error: PeerError) -> None:
        """A host is gone: nothing more is asked or served."""
        text = error.what.encode(errors="backslashreplace")  # of a system in other letters
        with self._failing:
            if self.error is not None:
                return
            for peer, line in self.lines.items():  # a thread that finds the error finds what it is to say
                if peer != error.host:
                    gone = ms.text_message(ms.Kind.GONE, text)
                    line.say(Outgoing(ms.Kind.GONE, error.rank, error.host, gone))
            self.error = error
        for line in self.lines.values():
            line.fail(error)
        self.changed()

    def _watch_all(self) -> None:
        pause = self.timeout_seconds / 20
        woken = Wake()
        while self.error is None and not self._ending:
            now = time.monotonic()
            for peer, line in self.lines.items():
                why = line.late(now, self.timeout_seconds)
                if why:
                    self.fail(self.peer_error(peer, why))
                    return
            woken.wait(min(pause, 0.5))

    # Ending.

    def changed(self) -> None:
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Until something has changed, or for so long."""
        self._changed.wait(seconds)

    def close(self, because: str | BaseException = "") -> None:
        """Wait for what was asked, say that nothing more will be, and serve until the other hosts have said
        so, too. ``because``: leave at once, and tell the others why, or which rank of this host is gone, by
        its PeerError. May be called more than once; an interrupt leaves at once."""
        if not self.here or self._closed:
            return
        self._closed = True
        try:
            if because:
                self.fail(self._reason(because))
            elif self.error is None:
                self._say_goodbye()
        except BaseException as error:
            self.fail(self._reason(error))
            raise
        finally:
            self._ending = True
            if self.error is not None:
                self._leave()
        if self.error is not None:
            return
        self._watch.end()
        for line in self.lines.values():
            for worker in line.workers:
                worker.end()
        self.wire.close(abort=False)

    def _reason(self, because: str | BaseException) -> PeerError:
        if isinstance(because, PeerError) and because.host == self.wire.host:
            return because
        text = because if isinstance(because, str) else f"has ended with {name_and_line(because)}"
        return self.peer_error(self.wire.host, text)

    def _say_goodbye(self) -> None:
        lines = list(self.lines.values())
        for line in lines:
            line.ask_no_more()
        while any(line.asking for line in lines) and self.error is None:
            self._changed.wait(0.05)
        for line in lines:
            line.say(Outgoing(ms.Kind.BYE))
        while not all(line.last for line in lines) and self.error is None:
            self._changed.wait(0.05)

    def _leave(self) -> None:
        """Let the others be told, as far as they listen, and have the threads come back from the network."""
        deadline = time.monotonic() + _GRACE_SECONDS
        assert self.error is not None
        for peer, line in self.lines.items():
            while peer != self.error.host and not line.workers[0].ended and time.monotonic() < deadline:
                self._changed.wait(0.02)
        self.wire.close(abort=True)
        workers = [worker for line in self.lines.values() for worker in line.workers]
        _wait_for(workers, time.monotonic() + _GRACE_SECONDS)


def _nobody(ids: Sequence[NDArray[np.int64]], place: AnswerPlace) -> tuple[Request, int]:
    raise ClosedError("rows are not served yet")


def _nobody_lists(asked: NDArray[np.int64], place: AnswerPlace) -> tuple[Request, int]:
    raise SourceError("neighbours were asked of a host whose topology is not split")


def _wait_for(workers: Sequence[Worker], deadline: float = math.inf) -> None:
    """Until all that were started have ended, or it is so late."""
    while not all(worker.ended for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)


def _shortly(about: Mapping[str, Any]) -> dict[str, Any]:
    """What hosts compare, as far as a message has room for it: of what is long its begin, and a digest."""
    short = dict(about)
    for name, value in about.items():
        told = json.dumps(value)
        if len(told) > _LONG:
            short[name] = f"{told[:_LONG]} ... (SHA-256 {hashlib.sha256(told.encode()).hexdigest()})"
    return short
