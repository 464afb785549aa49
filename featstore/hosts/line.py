"""A line between two hosts: on either end, what is asked of the other, and what the other asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.buffers import aligned_buffer
from featstore.base.passed_errors import decode_error, encode_error
from featstore.base.threads import Wake, Worker
from featstore.engine.request import Request
from featstore.errors import ClosedError, FeatstoreError, FormatError, PeerError
from featstore.hosts import messages as ms
from featstore.hosts.asks import AnswerPlace, Ask
from featstore.hosts.wire import Wire

PLACES = 4  # asks of a host that are under way at once, at each other
#: Messages of a host that may come at once. gloo tells the other end of each one that is waited for, behind
#: what goes that way meanwhile: with one alone, a line that is full in both directions stands still half of
#: the time.
POSTED = 2
_QUIET_SHARE = 5  # a line says that it is there so often in its time-out


class Serve(Protocol):
    """Reads rows for other hosts."""

    def __call__(self, ids: Sequence[NDArray[np.int64]], place: AnswerPlace) -> tuple[Request, int]:
        """Begin to read the rows of these node ids, of each table, into a place; the request, and the bytes
        that the body will have."""


class ServeLists(Protocol):
    """Samples neighbours for other hosts."""

    def __call__(self, asked: NDArray[np.int64], place: AnswerPlace) -> tuple[Request, int]:
        """The same for the neighbours that a message asks for."""


class Outgoing(NamedTuple):
    """A message to be sent, all but its header; ``then`` when it is."""

    kind: int
    number: int = 0
    detail: int = 0
    message: NDArray[np.uint8] | None = None  # none: it has no body
    then: Callable[[], None] | None = None


def received_bytes(body_bytes: int, ids_max: int, tables: int) -> int:
    """Of the largest message that may come, but for its header."""
    return max(body_bytes, 8 * (ids_max + tables), ms.TEXT_BYTES_MAX)


class HearsOfLoaders(Protocol):
    """Is told what another host says of its loaders."""

    def compare(self, peer: int, number: int, digest: int) -> None: ...

    def heard_steps(self, peer: int, number: int, steps: int) -> None: ...

    def heard_position(self, peer: int, loader: int, epoch: int, body: NDArray[np.uint8]) -> None: ...


class OfLines(Protocol):
    """What a line asks of the exchange that it is of."""

    wire: Wire
    tables: int
    body_bytes: int
    ids_max: int
    timeout_seconds: float
    serve: Serve
    serve_lists: ServeLists

    @property
    def error(self) -> PeerError | None:
        """Why nothing is asked or served any more."""

    def peer_error(self, host: int, what: str) -> PeerError: ...

    def lost(self, peer: int, error: Exception) -> None: ...

    def told(self, peer: int, host: int, rank: int, text: bytes) -> None: ...

    def received(self, kind: ms.Kind, rows: int, byte_count: int) -> None: ...

    def changed(self) -> None: ...

    @property
    def loaders(self) -> HearsOfLoaders: ...


class HostLine:
    """To one other host. Two threads, one that sends and one that receives, so that neither waits for the
    other."""

    def __init__(self, exchange: OfLines, peer: int) -> None:
        self._exchange, self.peer = exchange, peer
        self.heard = self._said = time.monotonic()
        self._lock = threading.Lock()
        # What is to be sent: asks before answers, which are far longer, and all else before both. So what
        # either host asks for comes while it sends what the other has asked for.
        self._first: deque[Outgoing] = deque()
        self._asks: deque[Ask] = deque()
        self._answers: deque[Outgoing] = deque()
        self.sent: dict[int, Ask] = {}
        self._numbers, self._asked_all = 0, False
        self.bye_sent = self.bye_heard = self.last = False
        self._serving = False  # by the thread that receives, which then hears of nobody
        self._wake = Wake()
        self._largest = exchange.body_bytes, exchange.ids_max
        self._places = [AnswerPlace(exchange.body_bytes, exchange.ids_max) for _ in range(PLACES)]
        self._free_places = threading.Semaphore(PLACES)
        # one more, so that they can come while another is looked at
        room = ms.HEADER_BYTES + received_bytes(exchange.body_bytes, exchange.ids_max, exchange.tables)
        self._received = [aligned_buffer(room) for _ in range(POSTED + 1)]
        self.workers = [
            Worker(self._send_all, f"featstore-send-{peer}"),
            Worker(self._receive_all, f"featstore-receive-{peer}"),
        ]

    # Asking.

    def ask(self, ask: Ask) -> None:
        with self._lock:
            if self._exchange.error is None and not self._asked_all:
                self._asks.append(ask)
                self._wake.set()
                return
        ask.end(self._exchange.error or ClosedError("the split store is closed: open it again to read rows"))

    def ask_no_more(self) -> None:
        """What is asked from now on fails with ClosedError."""
        with self._lock:
            self._asked_all = True

    def say(self, message: Outgoing) -> None:
        (self._answers if message.kind in (ms.Kind.ROWS, ms.Kind.ERROR) else self._first).append(message)
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Nothing that was asked will come."""
        with self._lock:
            asks = [*self._asks, *self.sent.values()]
            self._asks.clear()
            self.sent.clear()
        for ask in asks:
            ask.end(error)
        self._wake.set()

    @property
    def asking(self) -> bool:
        """Whether something asked is still to come."""
        with self._lock:
            return bool(self._asks or self.sent)

    def late(self, now: float, timeout: float) -> str:
        """Why the other host is given up; empty where it is not."""
        if now - self.heard > timeout and not self.last and not self._serving:
            return f"was not heard of for {timeout:g} seconds"
        with self._lock:
            oldest = min((ask.sent_at for ask in self.sent.values()), default=now)
        return f"has not answered within {timeout:g} seconds" if now - oldest > timeout else ""

    # Sending.

    def _send_all(self) -> None:
        exchange = self._exchange
        quiet = exchange.timeout_seconds / _QUIET_SHARE
        try:
            while True:
                message = self._next()
                if message is not None:
                    self._send(message)
                    if message.kind == ms.Kind.END:
                        for _ in range(POSTED - 1):  # whatever is still waited for there comes, too
                            self._send(message)
                    if message.kind in (ms.Kind.END, ms.Kind.GONE):
                        return
                    continue
                if exchange.error is not None:
                    return
                if time.monotonic() - self._said >= quiet:
                    self._send(Outgoing(ms.Kind.PING))
                self._wake.wait(quiet)
        except Exception as error:
            exchange.lost(self.peer, error)

    def _next(self) -> Outgoing | None:
        """What is to be sent next."""
        if self._first:
            return self._first.popleft()
        with self._lock:
            while self._asks and len(self.sent) < PLACES:
                ask = self._asks.popleft()
                if ask.over:
                    continue
                if len(self.sent) == PLACES - 1:  # what waits would have to wait longer
                    self._take_along(ask)
                self._numbers += 1
                self.sent[self._numbers] = ask
                ask.sent_at = time.monotonic()
                return Outgoing(ask.kind, self._numbers, 0, ask.message())
        if self._answers:
            return self._answers.popleft()
        if self.bye_sent and self.bye_heard and len(self._places) == PLACES:
            return Outgoing(ms.Kind.END)
        return None

    def _take_along(self, ask: Ask) -> None:
        """Have those in the same message that wait behind an ask, as far as they fit. With the lock."""
        while self._asks and (self._asks[0].over or ask.take_along(self._asks[0], *self._largest)):
            self._asks.popleft()

    def _send(self, one: Outgoing) -> None:
        raw = ms.message(0) if one.message is None else one.message
        ms.seal(raw, one.kind, one.number, one.detail)
        self._exchange.wire.send(self.peer, raw)
        self._said = time.monotonic()
        self.bye_sent |= one.kind == ms.Kind.BYE  # not before: nothing is said after END
        if one.then is not None:
            one.then()

    # Receiving.

    def _receive_all(self) -> None:
        exchange, wire = self._exchange, self._exchange.wire
        take = {
            ms.Kind.ASK: self._take_ask,
            ms.Kind.PICK: self._take_pick,
            ms.Kind.ROWS: self._take_rows,
            ms.Kind.ERROR: self._take_error,
        }
        try:
            spare, *rooms = self._received
            posted = deque((wire.post(self.peer, room), room) for room in rooms)
            while exchange.error is None:
                coming, raw = posted.popleft()
                wire.take(coming)
                self.heard = time.monotonic()
                found = ms.parse_header(raw)
                kind = ms.Kind(found.kind)
                if kind in (ms.Kind.END, ms.Kind.GONE):
                    break
                posted.append((wire.post(self.peer, spare), spare))
                if kind in take:
                    take[kind](found, ms.body_of(found, raw))
                elif kind == ms.Kind.SAME:
                    exchange.loaders.compare(self.peer, found.number, found.detail)
                elif kind == ms.Kind.STEPS:
                    exchange.loaders.heard_steps(self.peer, found.number, found.detail)
                elif kind == ms.Kind.BEGIN:
                    exchange.loaders.heard_position(
                        self.peer, found.number, found.detail, ms.body_of(found, raw)
                    )
                elif kind == ms.Kind.BYE:
                    self.bye_heard = True
                    self._wake.set()
                    exchange.changed()
                spare = raw
            else:
                return
            if kind == ms.Kind.GONE:
                exchange.told(self.peer, found.detail, found.number, ms.body_of(found, raw).tobytes())
            else:
                for coming, _ in posted:
                    wire.take(coming)
                self.last = True
                exchange.changed()
        except Exception as error:
            exchange.lost(self.peer, error)

    def _take_ask(self, found: ms.Header, body: NDArray[np.uint8]) -> None:
        asked, tables = _numbers(body), self._exchange.tables
        counts = asked[:tables]
        if len(asked) < tables or (counts < 0).any() or int(counts.sum()) != len(asked) - tables:
            raise _contradiction()
        ids = np.split(asked[tables:], np.cumsum(counts)[:-1])
        self._serve(found.number, lambda place: self._exchange.serve(ids, place))

    def _take_pick(self, found: ms.Header, body: NDArray[np.uint8]) -> None:
        asked = _numbers(body)
        self._serve(found.number, lambda place: self._exchange.serve_lists(asked, place))

    def _serve(self, number: int, serve: Callable[[AnswerPlace], tuple[Request, int]]) -> None:
        # The last answer may have arrived there before this thread knows that it is sent.
        if not self._free_places.acquire(timeout=self._exchange.timeout_seconds):
            raise FormatError(f"has asked for more than {PLACES} messages at once")
        place = self._places.pop()
        self._serving = True
        try:
            request, body_bytes = serve(place)
        except Exception as error:
            self._answer(number, place, 0, error)
            return
        finally:
            self.heard, self._serving = time.monotonic(), False
        request.add_done_callback(lambda r: self._answer(number, place, body_bytes, r.exception()))

    def _answer(self, number: int, place: AnswerPlace, body_bytes: int, error: BaseException | None) -> None:
        """What was asked for is in its place, or cannot be had."""

        def over() -> None:
            self._places.append(place)
            self._free_places.release()
            self._wake.set()  # it may have been the last

        if error is None:
            answer = place.message[: ms.HEADER_BYTES + body_bytes]
            self.say(Outgoing(ms.Kind.ROWS, number, 0, answer, over))
            return
        where = f"host {self._exchange.wire.host}"
        text = encode_error(error, where)
        if len(text) > ms.TEXT_BYTES_MAX:  # half of it would be no JSON
            text = encode_error(FeatstoreError(f"{type(error).__name__}: {str(error)[:1000]} ..."), where)
        self.say(Outgoing(ms.Kind.ERROR, number, 0, ms.text_message(ms.Kind.ERROR, text), over))

    def _answered(self, found: ms.Header) -> Ask:
        with self._lock:
            ask = self.sent.pop(found.number, None)
        if ask is None and self._exchange.error is None:
            raise FormatError(f"has answered what was not asked (number {found.number})")
        assert ask is not None
        return ask

    def _take_rows(self, found: ms.Header, body: NDArray[np.uint8]) -> None:
        ask = self._answered(found)
        wrong = ask.wrong(body)
        if wrong:
            ask.end(self._exchange.peer_error(self.peer, wrong))
            raise FormatError(wrong)
        ask.fill(body)
        self._exchange.received(ask.kind, ask.rows, len(body))
        self._wake.set()
        self._exchange.changed()

    def _take_error(self, found: ms.Header, body: NDArray[np.uint8]) -> None:
        error = decode_error(body.tobytes())
        error.add_note(f"on host {self.peer} (rank {self._exchange.wire.rank_of(self.peer)})")
        with self._lock:  # of several in a message, only those whose own rows cannot be had fail
            sent = self.sent.get(found.number)
            again = [] if sent is None else sent.apart()
            if again:
                del self.sent[found.number]
                self._asks.extend(again)
        if not again:
            self._answered(found).end(error)
        self._wake.set()
        self._exchange.changed()


def _numbers(body: NDArray[np.uint8]) -> NDArray[np.int64]:
    if len(body) % 8:
        raise _contradiction()
    return body.view(np.int64)


def _contradiction() -> FormatError:
    return FormatError("has asked in a way that contradicts itself")
