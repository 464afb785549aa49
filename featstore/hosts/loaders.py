"""What hosts tell each other of their loaders, so that all go through the same steps: the options of each,
how many mini-batches an epoch has where that is each host's own affair, and where an iteration begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from featstore.base.warning import warn
from featstore.errors import ArgumentError, ClosedError, FormatError, PeerError
from featstore.hosts import messages as ms
from featstore.hosts.line import HostLine, Outgoing
from featstore.hosts.wire import Wire

_EPOCHS_MAX = 1 << 40  # of a loader: its epoch has the number loader * _EPOCHS_MAX + epoch
#: In place of steps: how many there are is asked, or not any more; or there will be none.
_ASKED, _TAKEN_BACK, _CLOSED = -1, -2, -3


class Beginning(NamedTuple):
    """Where an iteration begins, and how many mini-batches its loader handed out before."""

    epoch: int
    step: int
    handed: int

    def __str__(self) -> str:
        return f"epoch {self.epoch} at mini-batch {self.step}, after {self.handed:,} in all"


class OfLoaders(Protocol):
    """What is asked of the exchange."""

    wire: Wire
    lines: dict[int, HostLine]

    @property
    def error(self) -> PeerError | None: ...

    def peer_error(self, host: int, what: str) -> PeerError: ...

    def fail(self, error: PeerError) -> None: ...

    def check_process(self) -> None: ...

    def changed(self) -> None: ...

    def wait(self, seconds: float) -> None: ...


class LoadersOfHosts:
    """Of all hosts. Loaders have the number of the order in which a host has made them."""

    def __init__(self, exchange: OfLoaders) -> None:
        self._exchange, self._lock = exchange, threading.Lock()
        self._own: list[int] = []  # digests of loaders' options
        self._theirs: dict[tuple[int, int], int] = {}
        self._steps: dict[tuple[int, int], int] = {}  # by host, and number of an epoch
        self._asked: dict[tuple[int, int], int] = {}  # by host and loader the epoch whose steps it waits for
        self._closed: set[tuple[int, int]] = set()  # host and loader
        self._threads: dict[int, int] = {}  # which goes through a loader
        self._begun: dict[tuple[int, int], list[Beginning]] = {}  # by host and loader, of each iteration
        self._elsewhere: list[str] = []  # where others begin, which nobody was told yet
        self._told_of: set[int] = set()  # loaders of which somebody was

    @property
    def _host(self) -> int:
        return self._exchange.wire.host

    def _say(self, kind: ms.Kind, number: int, detail: int, *body: int) -> None:
        for line in self._exchange.lines.values():
            line.say(Outgoing(kind, number, detail, _of_numbers(body) if body else None))

    # Their options.

    def agree(self, digest: int) -> int:
        """Say what options the next loader of this host has, and return its number; where another host's of
        the same number has others, their steps would not go together, and all fail."""
        with self._lock:
            number = len(self._own)
            self._own.append(digest)
        self._say(ms.Kind.SAME, number, digest)
        for peer in self._exchange.lines:
            self._compare(peer, number)
        return number

    def compare(self, peer: int, number: int, digest: int) -> None:
        """Another host has said what options one of its loaders has."""
        self._theirs[peer, number] = digest
        self._compare(peer, number)

    def _compare(self, peer: int, number: int) -> None:
        theirs = self._theirs.get((peer, number))
        own = self._own[number] if number < len(self._own) else theirs
        if theirs is not None and own != theirs:
            what = (
                f"makes a loader (its number {number} of this store) of other options than this host: mode, "
                "seeds or links, fanouts, batch_size, seed, drop_last, graph and options of sampling must be "
                "the same on all, or steps would not be"
            )
            self._exchange.fail(self._exchange.peer_error(peer, what))

    # Their steps.

    def say_steps(self, loader: int, epoch: int, steps: int) -> None:
        """Tell all hosts how many steps this one has in an epoch; what it has told, it does not tell
        again. Raises ArgumentError for an epoch that has no number."""
        if epoch >= _EPOCHS_MAX:
            raise ArgumentError(f"hosts count {_EPOCHS_MAX:,} epochs of a loader, from 0 on, not {epoch:,}")
        number = loader * _EPOCHS_MAX + epoch
        self._threads[loader] = threading.get_ident()
        if (self._host, number) not in self._steps:
            self._steps[self._host, number] = steps
            self._say(ms.Kind.STEPS, number, steps)

    def say_closed(self, loader: int) -> None:
        """Tell all hosts that there will be no steps beyond those that this one has told."""
        self._say(ms.Kind.STEPS, loader * _EPOCHS_MAX, _CLOSED)

    def heard_steps(self, peer: int, number: int, steps: int) -> None:
        """Another host has said how many it has, or asks how many this one has, or does not any more, or has
        closed the loader."""
        loader, epoch = divmod(number, _EPOCHS_MAX)
        if steps == _ASKED:
            self._asked[peer, loader] = epoch
        elif steps == _TAKEN_BACK:
            self._asked.pop((peer, loader), None)
        elif steps == _CLOSED:
            self._closed.add((peer, loader))
        else:
            self._steps[peer, number] = steps
        self._exchange.changed()

    def steps_of_all(self, loader: int, epoch: int, unwanted: Callable[[], bool]) -> list[int]:
        """The steps of all hosts in an epoch, in their order, waited for until nobody wants them any more.
        Raises PeerError, also where a host waits for those of another epoch, or has closed the loader;
        ClosedError."""
        number, found = loader * _EPOCHS_MAX + epoch, list[int]()
        for host in range(self._exchange.wire.hosts):
            if (host, number) not in self._steps:
                self._wait_for(host, loader, epoch, unwanted)
            found.append(self._steps[host, number])
        return found

    def _wait_for(self, host: int, loader: int, epoch: int, unwanted: Callable[[], bool]) -> None:
        exchange, number = self._exchange, loader * _EPOCHS_MAX + epoch
        line, came = exchange.lines[host], False
        line.say(Outgoing(ms.Kind.STEPS, number, _ASKED))
        try:
            while (host, number) not in self._steps:
                closed = (host, loader) in self._closed  # and what it asked before that is heard
                self._check_asked(host, loader, epoch)
                if exchange.error is not None:
                    raise exchange.error
                if line.bye_heard:
                    raise exchange.peer_error(host, "has closed the store, and begins no epoch any more")
                if closed and (host, number) not in self._steps:
                    what = f"has closed its loader {loader}, and begins epoch {epoch} of it no more"
                    raise exchange.peer_error(host, what)
                exchange.check_process()
                if unwanted():
                    raise ClosedError(
                        "the loader is closed, which waited for another host to begin the epoch"
                    )
                exchange.wait(0.05)
            came = True
        finally:
            if not came and exchange.error is None:  # else the other has to find the same
                line.say(Outgoing(ms.Kind.STEPS, number, _TAKEN_BACK))

    def _said(self, host: int, loader: int, epoch: int) -> bool:
        return (host, loader * _EPOCHS_MAX + epoch) in self._steps

    def _check_asked(self, host: int, loader: int, epoch: int) -> None:
        """Fail where the host that this one waits for waits for what this one, as it waits, will not say."""
        # what is asked of a loader of another thread, that thread may say
        own = [one for one, thread in list(self._threads.items()) if thread == threading.get_ident()]
        asked = [(one, self._asked[host, one]) for one in own if (host, one) in self._asked]
        asked = [one for one in asked if one != (loader, epoch) and not self._said(self._host, *one)]
        if not asked or self._said(host, loader, epoch):  # what it said before it asked has come before
            return
        what = (
            f"begins epoch {asked[0][1]} of its loader {asked[0][0]}, and this host epoch {epoch} of its "
            f"loader {loader}, so that each waits for the other: go through loaders, and call set_epoch() "
            "and load_state_dict(), alike on all hosts"
        )
        self._exchange.fail(self._exchange.peer_error(host, what))

    # Where they begin.

    def say_position(self, loader: int, epoch: int, step: int, handed: int) -> None:
        """Tell all hosts where an iteration of this one begins, and how many mini-batches came before it."""
        self._begins(self._host, loader, Beginning(epoch, step, handed))
        self._say(ms.Kind.BEGIN, loader, epoch, step, handed)

    def heard_position(self, peer: int, loader: int, epoch: int, body: NDArray[np.uint8]) -> None:
        """Another host has said where one of its own begins."""
        if len(body) != 16:
            raise FormatError("has not said where it begins")
        self._begins(peer, loader, Beginning(epoch, *body.view(np.int64).tolist()))

    def _begins(self, host: int, loader: int, position: Beginning) -> None:
        """The n-th iteration of a loader that hands out anything is to begin alike on all hosts."""
        with self._lock:
            begun = self._begun.setdefault((host, loader), [])
            begun.append(position)
            number, here = len(begun) - 1, self._begun.get((self._host, loader), [])
            for peer in self._exchange.lines:
                theirs = self._begun.get((peer, loader), [])
                both = number < min(len(here), len(theirs))
                if both and here[number] != theirs[number] and loader not in self._told_of:
                    self._told_of.add(loader)
                    self._elsewhere.append(
                        f"host {peer} begins {theirs[number]}, and this host {here[number]}: their steps are "
                        "not the same, and who waits for the other (DistributedDataParallel) may wait in "
                        "vain; go through loaders, and call set_epoch() and load_state_dict(), alike on all"
                    )

    def check(self) -> None:
        """Warn, once for each loader, where another host begins elsewhere."""
        if self._elsewhere:
            with self._lock:
                told, self._elsewhere = self._elsewhere, []
            for text in told:
                warn(text)


def _of_numbers(numbers: Sequence[int]) -> NDArray[np.uint8]:
    """A message whose body they are. Each line has its own, as it writes the header into it."""
    raw = ms.message(8 * len(numbers))
    raw[ms.HEADER_BYTES :].view(np.int64)[:] = numbers
    return raw
