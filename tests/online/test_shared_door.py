"""Who comes to the door of a shared buffer without its key: however many, slow or loud they are, clients with
the key are served."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from processes import child, exit_code
from test_buffer import eventually, in_thread

import featstore
from featstore.errors import ClosedError, FeatstoreError
from featstore.shared import client as shared_client
from featstore.shared import door as shared_door
from featstore.shared import protocol as shared_protocol
from featstore.shared.client import BufferClient
from featstore.shared.owner import SharedBuffer

SECONDS = 10.0


@pytest.fixture
def shared(store: featstore.Store) -> Iterator[SharedBuffer]:
    with SharedBuffer(store, memory="8MiB") as made:
        yield made
        assert made._service.error is None


def stranger(shared: SharedBuffer) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(shared._service.address)  # waits while many are before it
    made.settimeout(SECONDS)
    return made


def served(shared: SharedBuffer, features: np.ndarray) -> None:
    """A new client gets its rows, and soon."""
    rows = in_thread(lambda: shared.client().read([1, 999])).result(SECONDS)
    np.testing.assert_array_equal(rows, features[[1, 999]])


@pytest.fixture
def crowd(shared: SharedBuffer) -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


def test_many_that_say_nothing(
    shared: SharedBuffer, features: np.ndarray, crowd: list[socket.socket]
) -> None:
    before = len(shared._service._guests)
    for _ in range(300):
        crowd.append(stranger(shared))
    served(shared, features)
    assert eventually(lambda: len(shared._service._guests) <= before + shared_door.STRANGERS_MAX + 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads
def test_the_owner_keeps_its_descriptors(shared: SharedBuffer, features: np.ndarray) -> None:
    """Each stranger took one for good: with none left to the owner, new clients hung."""
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))

    def besiege() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)  # this process has descriptors of its own
        held = [stranger(shared) for _ in range(highest + 100)]
        time.sleep(60)
        del held

    def read() -> bool:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return bool(np.array_equal(shared.client().read([1, 999]), features[[1, 999]]))

    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    besieger = child(besiege)
    try:
        time.sleep(0.5)
        assert exit_code(child(read), SECONDS) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.kill(besieger, signal.SIGKILL)
        os.waitpid(besieger, 0)


def test_who_says_nothing_goes_after_a_while(
    shared: SharedBuffer, features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_door, "HANDSHAKE_SECONDS", 0.2)
    client = shared.client()
    client.read([0])
    with stranger(shared) as silent, stranger(shared) as slow:
        for one in (silent, slow):
            one.recv(32, socket.MSG_WAITALL)
        gone = False
        for _ in range(40):  # a byte now and then does not help
            try:
                slow.send(b"x")
            except OSError:
                gone = True
                break
            time.sleep(0.05)
        assert gone
        assert silent.recv(1) == b""
    assert eventually(lambda: len(shared._service._guests) == 1)
    # who has the key may be silent as long as it likes
    np.testing.assert_array_equal(client.read([3]), features[[3]])


def test_garbage(shared: SharedBuffer, features: np.ndarray, crowd: list[socket.socket]) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 63, 64, 65, 500, 5000) * 20:
        crowd.append(stranger(shared))
        with contextlib.suppress(OSError):
            crowd[-1].sendall(rng.bytes(size))
    served(shared, features)
    for one in crowd:
        one.close()
    assert eventually(lambda: not shared._service._door._strangers)


def test_clients_among_a_crowd_that_does_not_end(shared: SharedBuffer, features: np.ndarray) -> None:
    """Others connect as fast as they can; each may show a client out, which comes again."""
    stop = False

    def besiege() -> None:
        while not stop:
            with contextlib.suppress(OSError):
                stranger(shared).close()

    besieging = [in_thread(besiege) for _ in range(2)]
    try:
        for _ in range(5):
            served(shared, features)
    finally:
        stop = True
    for one in besieging:
        one.result(SECONDS)


@pytest.mark.parametrize("accepts", [False, True])
def test_an_owner_that_does_not_answer_is_told_of(monkeypatch: pytest.MonkeyPatch, accepts: bool) -> None:
    monkeypatch.setattr(shared_client, "CONNECT_SECONDS", 0.3)
    address = "\0featstore-" + shared_protocol.new_nonce().hex()
    with socket.socket(socket.AF_UNIX) as door, contextlib.ExitStack() as waiting:
        door.bind(address)
        door.listen(0)
        if not accepts:  # so that the next one does not even come to the door
            first = waiting.enter_context(socket.socket(socket.AF_UNIX))
            first.connect(address)
        client = BufferClient(address, shared_protocol.new_key())
        asked = in_thread(lambda: client.read([1]))
        with pytest.raises(ClosedError, match=r"has not answered for .* seconds.*stopped"):
            asked.result(SECONDS)


def test_a_door_that_closes_on_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is shown out again and again gives up."""
    monkeypatch.setattr(shared_client, "CONNECT_SECONDS", 0.3)
    address = "\0featstore-" + shared_protocol.new_nonce().hex()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        door.settimeout(2)

        def close_all() -> None:
            with contextlib.suppress(TimeoutError):
                while True:
                    door.accept()[0].close()

        closing = in_thread(close_all)
        client = BufferClient(address, shared_protocol.new_key())
        with pytest.raises(FeatstoreError, match="has not answered"):
            in_thread(lambda: client.read([1])).result(SECONDS)
        closing.result(SECONDS)
