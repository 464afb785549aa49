"""How a host comes to the others while it opens its store: the group of one process of each host that lines
go through. One that cannot open it tells those who wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from featstore.base.error_text import first_line, name_and_line
from featstore.base.modules import loaded
from featstore.base.passed_errors import decode_error, encode_error
from featstore.base.threads import Reply, Worker
from featstore.errors import PeerError, SourceError
from featstore.hosts.meeting import HasFailed, Rendezvous
from featstore.hosts.places import WIRE_PATIENCE, HostPlace
from featstore.hosts.wire import GlooWire

_MORE_PATIENCE = 1.1  # of that, for all of what hosts do to meet, and to connect once all are there
_TELL_SECONDS = 5.0  # at most, to tell the others of an error, and of an interrupt
_INTERRUPT_SECONDS = 1.0
_one_at_a_time = threading.Lock()  # hosts have no numbers for their meetings


class Opening:
    """Of a store on this host, until it has lines to the others. An error that leaves ``with`` before that is
    told to them, where ``torch.distributed`` has been started.

    All waiting for others shares one patience: :data:`featstore.hosts.places.WIRE_PATIENCE` time-outs.
    """

    def __init__(self) -> None:
        self.place: HostPlace | None = None  # as soon as it is known
        self.part: int | None = None  # the same
        self._timeout = self._patience = self._left = 0.0
        self._meeting: Rendezvous | None = None
        self._over = False

    def come(self, place: HostPlace, timeout_seconds: float) -> None:
        """Meet the other hosts, whichever machine has which part. All leaders call it at the same time.
        Raises PeerError where some do not come in time, or have failed."""
        self.place, self._timeout = place, timeout_seconds
        self._patience = self._left = WIRE_PATIENCE * timeout_seconds
        self._meeting = Rendezvous(default_store(), place.leaders[place.machine], place.leaders, place.host)
        with _one_at_a_time:
            self._reach(self._meeting, "come", "has not come")

    def open_wire(self) -> GlooWire:
        """Lines to the other hosts, once all that have come are as far. Raises PeerError, and SourceError
        where two have the same part."""
        import torch
        import torch.distributed.distributed_c10d as c10d

        place, meeting, store = self.place, self._meeting, default_store()
        assert place is not None
        assert meeting is not None
        self._reach(meeting, "ready", "has come, and has not opened its part")
        # who waits for a name in a store keeps it from being asked meanwhile
        apart = store.clone() if hasattr(store, "clone") else store
        named, seconds = c10d.PrefixStore(meeting.name, apart), max(self._left, self._timeout)

        # Not by new_group: a second group of the same ranks would meet under the name of the first, once that
        # is destroyed, at addresses where nobody is any more.
        def connect() -> tuple[list[Any], list[torch.Tensor]]:
            parts: list[torch.Tensor] = []
            groups: list[Any] = [
                c10d.ProcessGroupGloo(
                    c10d.PrefixStore(way, named), place.machine, place.hosts, timedelta(seconds=seconds)
                )
                for way in ("up", "down")
            ]
            for group in groups:
                parts = [torch.empty(1, dtype=torch.int64) for _ in range(place.hosts)]
                group.allgather([parts], [torch.tensor([place.host])]).wait()
            return groups, parts

        try:
            # gloo tries a host that died while it was meeting the others five times, each for all that.
            (up, down), parts = within(_MORE_PATIENCE * seconds, connect)
        except (RuntimeError, TimeoutError) as error:
            why = first_line(error) if str(error) else "it was there, and did not answer"
            others = [rank for rank in place.leaders if rank != place.leaders[place.machine]]
            raise self._absent(others, "has not come", f" ({why})") from error
        machine_of = {int(part): machine for machine, part in enumerate(parts)}
        if len(machine_of) < place.hosts:
            raise SourceError(
                f"the {place.hosts} machines of this run have the parts {sorted(int(p) for p in parts)}: "
                "give each one of its own, so that all are there"
            )
        order, self._over = [machine_of[host] for host in range(place.hosts)], True
        return GlooWire(up, down, order, place.leaders, self._patience)

    def _reach(self, meeting: Rendezvous, stage: str, late: str) -> None:
        """Wait for the others to come so far, in what is left of the patience."""
        place, left, begin = self.place, self._left, time.monotonic()
        assert place is not None
        try:
            missing = within(_MORE_PATIENCE * left + self._timeout / 10, lambda: meeting.reach(stage, left))
        except HasFailed as said:
            reason = decode_error(said.why.encode())
            host = said.rank // place.ranks if said.part is None else said.part
            reason.add_note(f"on host {host} (rank {said.rank})")
            raise PeerError(
                host, said.rank, f"could not open its store ({name_and_line(reason)})"
            ) from reason
        except (RuntimeError, TimeoutError) as error:
            why = f" ({first_line(error)})" if str(error) else ""
            what = f"has the store by which ranks of this run meet, and it does not answer{why}"
            raise PeerError(0, 0, what) from error
        if missing:
            raise self._absent(missing, late)
        self._left = max(0.0, left - (time.monotonic() - begin))

    # Failing.

    def _absent(self, ranks: list[int], late: str, why: str = "") -> PeerError:
        """For one of these ranks that is ``late``."""
        place, meeting, host, first = self.place, self._meeting, None, ranks[0]
        assert place is not None
        assert meeting is not None
        with suppress(RuntimeError, TimeoutError):  # whose store has gone, too
            host = within(_INTERRUPT_SECONDS, lambda: meeting.part_of(first, "come"))
        which = "" if len(ranks) == 1 else "or another "
        what = f"{which}{late} within {self._patience:g} seconds{why}"
        return PeerError(first // place.ranks if host is None else host, first, what)

    def __enter__(self) -> Opening:
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        # Of a host that is late or dead all learn by themselves; who has heard of one that has failed, and
        # leads, has the others hear it.
        known = isinstance(error, PeerError) and not (self._meeting is not None and self._meeting.heard)
        if error is None or known or self._over:
            return
        place = self.place
        if not has_begun():
            return
        if place is not None and (place.hosts == 1 or not place.leads):
            return
        with suppress(Exception):  # what cannot be told must not hide what it is about
            self._tell(error, _TELL_SECONDS if isinstance(error, Exception) else _INTERRUPT_SECONDS)

    def _tell(self, error: BaseException, seconds: float) -> None:
        import torch.distributed as dist

        if self._meeting is None:
            ranks = range(dist.get_world_size()) if self.place is None else self.place.leaders
            self._meeting = Rendezvous(default_store(), dist.get_rank(), ranks, self.part)
        meeting, why = self._meeting, encode_error(error, "the opening of its store").decode()
        if _one_at_a_time.acquire(timeout=seconds):
            try:
                within(_MORE_PATIENCE * seconds, lambda: meeting.fail(why, seconds))
            finally:
                _one_at_a_time.release()


def has_begun() -> bool:
    """Whether ``torch.distributed`` has been started."""
    dist = loaded("torch.distributed", "get_rank")
    return dist is not None and bool(dist.is_available() and dist.is_initialized())


def default_store() -> Any:
    """The store of ``torch.distributed``."""
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_store()


def within(seconds: float, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, in a thread, which is left to itself where it takes longer: then TimeoutError."""
    reply = Reply()

    def answer() -> None:
        try:
            reply.put((None, make()))
        except BaseException as error:
            reply.put((error, None))

    Worker(answer, "featstore-hosts-meeting").start()
    outcome = reply.wait(seconds)
    if outcome is None:
        raise TimeoutError
    error, made = outcome
    if error is not None:
        raise error
    return made
