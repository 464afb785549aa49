"""Rows of other hosts: each is the source's, whoever owns it, and a host that is gone is told, by all, in
time.

The hosts here are threads of one process, over wires that tests can meddle with; over a network:
``test_split_training.py``."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import Meddle, Wires

import featstore
from featstore.base.threads import Worker
from featstore.engine.request import Request
from featstore.errors import (
    ArgumentError,
    BudgetError,
    CancelledError,
    ClosedError,
    CorruptionError,
    FormatError,
    IdError,
    PeerError,
    SourceError,
)
from featstore.hosts import messages as ms
from featstore.hosts.asks import Ask, RowsAsk
from featstore.hosts.exchange import Exchange
from featstore.hosts.line import PLACES, HostLine
from featstore.hosts.loaders import LoadersOfHosts
from featstore.hosts.owners import Owners
from featstore.hosts.source import HostsSource, PeersSource, Serving, body_bytes_for, ids_max_for
from featstore.testing import ArraySource, check_source
from featstore.tiers.bundle import Bundle

ROWS = 700
SECONDS = 20.0
DTYPES = ["float32", "uint8", "bfloat16", "records"]


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {
        "float32": rng.standard_normal((ROWS, 20), np.float32),
        "uint8": rng.integers(0, 255, (300, 3), np.uint8),
        "bfloat16": rng.standard_normal((90, 2, 150)).astype(ml_dtypes.bfloat16),
        "records": rng.integers(0, 2**30, 200).astype([("a", "<i8")]),
        "long": rng.integers(0, 255, (40, 40_000), np.uint8),
    }
    for one in made.values():
        one.flags.writeable = False
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any, arrays: dict[str, np.ndarray]) -> Any:
    with pack(tmp_path_factory.mktemp("hosts") / "s", arrays) as made:
        yield made


class Host:
    """One host: its source of all rows, and the source of its own."""

    def __init__(
        self, store: Any, arrays: dict[str, np.ndarray], hosts_of: dict[str, np.ndarray], wires: Wires,
        host: int, body_bytes: int, timeout: float, about: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.owners = {n: Owners(n, one, host, wires.hosts) for n, one in hosts_of.items()}
        own = {n: arrays[n][np.flatnonzero(one == host)] for n, one in hosts_of.items()}
        self.local = ArraySource(store, own)
        self.exchange = Exchange(
            wires.wire(host), about or {"family": "f"}, tables=len(hosts_of), body_bytes=body_bytes,
            ids_max=ids_max_for(body_bytes), timeout_seconds=timeout,
        )  # fmt: skip
        self.peers = PeersSource(store, self.owners, self.exchange)
        self.source = HostsSource(store, self.owners, self.local, self.peers)
        self.exchange.start(Serving(store, self.owners, self.local))


@contextmanager
def hosts(
    store: Any, arrays: dict[str, np.ndarray], count: int, *, tables: tuple[str, ...] = ("float32",),
    seed: int = 0, body_bytes: int = 1 << 16, timeout: float = SECONDS, meddle: Meddle | None = None,
) -> Iterator[tuple[list[Host], Wires]]:  # fmt: skip
    rng = np.random.default_rng(seed)
    used = {name: arrays[name] for name in tables}
    hosts_of = {n: rng.integers(0, count, len(one)).astype(np.uint8) for n, one in used.items()}
    wires = Wires(count, meddle)
    with ThreadPoolExecutor(count) as pool:
        begun = [
            pool.submit(Host, store, used, hosts_of, wires, h, body_bytes, timeout) for h in range(count)
        ]
        made = [one.result(SECONDS) for one in begun]
        try:
            yield made, wires
        finally:
            for one in [pool.submit(host.exchange.close) for host in made]:
                one.result(SECONDS)


def each(made: list[Host], do: Callable[[Host], Any]) -> list[Any]:
    """What every host does, all at the same time; errors as results."""

    def tried(host: Host) -> Any:
        try:
            return do(host)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return [one.result(SECONDS) for one in [pool.submit(tried, host) for host in made]]


# Rows.


@settings(max_examples=8)
@given(
    count=st.integers(1, 4), seed=st.integers(0, 2**30),
    tables=st.lists(st.sampled_from([*DTYPES, "long"]), min_size=1, max_size=3, unique=True),
    body_bytes=st.sampled_from([40_000, 65_536, 1 << 20]),
)  # fmt: skip
def test_every_row_is_the_sources(
    store: featstore.Store, arrays: dict[str, np.ndarray], count: int, seed: int, tables: list[str],
    body_bytes: int,
) -> None:  # fmt: skip
    body_bytes = ms.padded(body_bytes)
    with hosts(store, arrays, count, tables=tuple(tables), seed=seed, body_bytes=body_bytes) as (made, _):
        used = {name: arrays[name] for name in tables}
        results = each(
            made, lambda host: check_source(host.source, used, seed=seed, requests=4, threads=2, ids_max=200)
        )
        assert results == [None] * count


def test_only_rows_of_others_cross_and_each_once(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with hosts(store, arrays, 2) as (made, _):
        ids = np.random.default_rng(1).permutation(ROWS)[:300]
        rows = made[0].source.submit({"float32": ids}, out=None).result(SECONDS)["float32"]
        np.testing.assert_array_equal(rows, arrays["float32"][ids])
        others = int((~made[0].owners["float32"].mine(ids)).sum())
        assert made[0].exchange.counted()[0] == others
        assert (made[0].local.asked, made[1].local.asked) == (len(ids) - others, others)
        assert made[0].source.hits() == len(ids) - others


def test_all_tables_of_a_request_cross_in_one_message(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with hosts(store, arrays, 2, tables=("float32", "uint8", "records")) as (made, wires):
        ids = {name: np.arange(30) for name in ("float32", "uint8", "records")}
        before = wires.sent[0, 1]
        out = made[0].source.submit(ids, out=None).result(SECONDS)
        assert wires.sent[0, 1] - before == 1
        for name, rows in out.items():
            np.testing.assert_array_equal(rows, arrays[name][:30])


@contextmanager
def busy(made: list[Host]) -> Iterator[list[Any]]:
    """Host 1 reads nothing until the end of this; host 0 has asked for as much as may be under way. Then one
    of these is answered, and when what has waited has gone, all is."""
    made[1].local.held = True
    others = np.flatnonzero(~made[0].owners["float32"].mine(np.arange(ROWS)))
    first, line = [], made[0].exchange.lines[1]
    for number in range(PLACES):  # one after the other: what waits goes together
        first.append(made[0].source.submit({"float32": others[number : number + 1]}, out=None))
        while len(made[1].local._open) <= number:
            time.sleep(0.005)
    try:
        yield first
        oldest = next((one for one in first if not one.done()), first[0])
        made[1].local.let_go(1)
        oldest.exception(SECONDS)
        while line._asks and len(line.sent) < PLACES:
            time.sleep(0.005)
    finally:
        made[1].local.held = False
        made[1].local.let_go()


class Asked:
    """Counts what host 0 asks of host 1: messages, not those that say it is there."""

    def __init__(self) -> None:
        self.messages = 0

    def __call__(self, source: int, to: int, number: int, data: np.ndarray) -> np.ndarray:
        kind = int(data[: ms.HEADER_BYTES].view(np.int64)[1])
        self.messages += (source, to, kind) == (0, 1, ms.Kind.ASK)
        return data


TOGETHER = ("float32", "uint8", "bfloat16", "records")


def test_what_waits_for_a_host_goes_in_one_message(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    """Also of the same table, of requests that ask for several, and into memory of their own."""
    rng, counted = np.random.default_rng(5), Asked()
    with hosts(store, arrays, 2, tables=TOGETHER, meddle=counted) as (made, _):
        with busy(made) as first:
            before, asked = counted.messages, list[tuple[Any, Any, np.ndarray]]()
            for number in range(12):
                names = TOGETHER[number % 3 :][:2]
                ids = {name: rng.integers(0, len(arrays[name]), 3 + number) for name in names}
                rows = {name: np.empty_like(arrays[name][:30]) for name in names}
                at = rng.permutation(30)[: 3 + number]
                made_of = made[0].source.submit(ids, out=rows, at=dict.fromkeys(names, at))
                asked.append((made_of, ids, at))
            gone = made[0].source.submit({"uint8": np.arange(40)}, out=None)
            gone.cancel()
            assert counted.messages == before
        for request in first:
            request.result(SECONDS)
        for request, ids, at in asked:
            for name, rows in request.result(SECONDS).items():
                np.testing.assert_array_equal(rows[at], arrays[name][ids[name]])
        assert counted.messages == before + 1
        assert gone.cancelled()


def test_messages_stay_as_large_as_agreed(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    body_bytes, counted = 4096, Asked()  # some 50 rows
    with hosts(store, arrays, 2, body_bytes=body_bytes, meddle=counted) as (made, _):
        ids = np.random.default_rng(1).integers(0, ROWS, (40, 20))
        with busy(made):
            before = counted.messages
            asked = [made[0].source.submit({"float32": one}, out=None) for one in ids]
        for request, one in zip(asked, ids, strict=True):
            rows = request.result(SECONDS)["float32"]
            np.testing.assert_array_equal(rows, arrays["float32"][one])
        assert 40 * 10 * 80 / body_bytes <= counted.messages - before < 40


def test_one_of_a_message_that_is_not_wanted_any_more_leaves_the_others_theirs(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with hosts(store, arrays, 2, tables=("float32", "uint8")) as (made, _):
        line = made[0].exchange.lines[1]
        with busy(made) as first:
            rows = [np.full((ROWS, 20), 7, np.float32) for _ in range(3)]
            asked = [made[0].peers.submit(_others(made[0], 9), out={"float32": one}) for one in rows]
            made[1].local.let_go(1)
            first[0].result(SECONDS)
            while line._asks or len(made[1].local._open) < PLACES:
                time.sleep(0.005)
            assert asked[0].cancel()  # which the message is of
            assert asked[0].cancelled()
        asked[1].result(SECONDS)
        asked[2].result(SECONDS)
        np.testing.assert_array_equal(rows[1][:9], arrays["float32"][_others(made[0], 9)["float32"]])
        np.testing.assert_array_equal(rows[1], rows[2])
        assert (rows[0] == 7).all()


def _others(host: Host, count: int) -> dict[str, np.ndarray]:
    return {"float32": np.flatnonzero(~host.owners["float32"].mine(np.arange(ROWS)))[:count]}


@pytest.mark.parametrize("gone", [False, True])
def test_an_error_is_told_to_all_of_a_message(
    store: featstore.Store, arrays: dict[str, np.ndarray], gone: bool
) -> None:
    with hosts(store, arrays, 2) as (made, wires):
        with busy(made):
            asked = [made[0].source.submit({"float32": np.arange(ROWS)}, out=None) for _ in range(5)]
            if gone:
                wires.kill(1)
            else:
                made[1].local.error = CorruptionError("/there", 0, "checksum", "another")
        kind = PeerError if gone else CorruptionError
        assert [type(request.exception(SECONDS)) for request in asked] == [kind] * 5
        made[1].local.error = None


def test_of_a_message_only_those_fail_whose_own_rows_cannot_be_had(
    store: featstore.Store, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are asked for again, each by itself, also where nothing more may be asked."""
    counted = Asked()
    with hosts(store, arrays, 2, meddle=counted) as (made, _):
        others = _others(made[0], 60)["float32"]
        bad, whole = 17, made[1].local.submit  # by number there, of those rows the same

        def damaged(ids: Any, **where: Any) -> Request:
            request = whole(ids, **where)
            if bad not in ids["float32"]:
                return request
            request.result(SECONDS)
            failed = Request(lambda: None)
            failed.answer(CorruptionError("/there", bad, "checksum", "another"))
            return failed

        with busy(made):
            before = counted.messages
            asked = [made[0].source.submit({"float32": one}, out=None) for one in others.reshape(12, 5)]
            monkeypatch.setattr(made[1].local, "submit", damaged)
            closing = threading.Thread(target=made[0].exchange.close, daemon=True)
            closing.start()
            while not made[0].exchange.lines[1]._asked_all:
                time.sleep(0.005)
        errors = [type(request.exception(SECONDS)) for request in asked]
        assert errors == [CorruptionError if n == 17 // 5 else type(None) for n in range(12)]
        for request, one in zip(asked, others.reshape(12, 5), strict=True):
            if request.exception() is None:
                np.testing.assert_array_equal(request.result()["float32"], arrays["float32"][one])
        assert counted.messages - before == 13
        made[1].exchange.close()
        closing.join(SECONDS)
        assert not closing.is_alive()


def test_nothing_is_kept_by_what_is_over(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    """Asks and requests are freed at once, not when a collector comes by; with their rows."""
    gc.collect()
    gc.disable()
    try:
        with hosts(store, arrays, 2, tables=("float32", "uint8")) as (made, _):
            bundle, kept = Bundle(made[0].source), []
            for number in range(6):
                rows = {name: np.empty_like(arrays[name][:40]) for name in ("float32", "uint8")}
                at = np.arange(40)
                with bundle.together():
                    asked = [
                        bundle.submit({n: np.arange(40) + number}, out={n: one}, at={n: at})
                        for n, one in rows.items()
                    ]
                for request in asked:
                    request.result(SECONDS)
                kept += [weakref.ref(one) for one in (*asked, *rows.values())]
                del rows, asked, request, at
            deadline = time.monotonic() + SECONDS  # threads may have the last ones a moment longer
            while sum(one() is not None for one in kept) > 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert sum(one() is not None for one in kept) <= 4
    finally:
        gc.enable()


def test_nothing_is_written_after_a_cancelled_request_is_done(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with hosts(store, arrays, 2) as (made, _):
        made[1].local.held = True
        ids = np.flatnonzero(~made[0].owners["float32"].mine(np.arange(ROWS)))
        out = np.zeros((len(ids), 20), np.float32)
        request = made[0].source.submit({"float32": ids}, out={"float32": out})
        assert request.cancel()
        with pytest.raises(CancelledError):
            request.result(SECONDS)
        made[1].local.held = False
        made[1].local.let_go()
        again = made[0].source.submit({"float32": ids[:5]}, out=None).result(SECONDS)
        np.testing.assert_array_equal(again["float32"], arrays["float32"][ids[:5]])
        assert not out.any()


def test_hosts_may_ask_for_different_amounts_and_end_at_different_times(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    """Whoever has ended serves on until all have."""

    def work(host: Host) -> int:
        rng = np.random.default_rng(host.exchange.wire.host)
        for _ in range(40 * host.exchange.wire.host):
            ids = rng.integers(0, ROWS, 50)
            rows = host.source.submit({"float32": ids}, out=None).result(SECONDS)["float32"]
            np.testing.assert_array_equal(rows, arrays["float32"][ids])
        host.exchange.close()
        return 1

    with hosts(store, arrays, 3) as (made, _):
        assert each(made, work) == [1, 1, 1]
        assert all(host.exchange.error is None for host in made)


def test_ids_that_are_none(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    with hosts(store, arrays, 2) as (made, _):
        for wrong in (-1, ROWS):
            with pytest.raises(IdError, match=f"{wrong}.*out of range"):
                made[0].source.submit({"float32": np.array([0, wrong])}, out=None)
        with pytest.raises(ArgumentError, match="out must be"):
            made[0].source.submit({"float32": np.arange(9)}, out={"float32": np.zeros((9, 3))})
        rows = made[0].source.submit({"float32": np.arange(9)}, out=None).result(SECONDS)
        np.testing.assert_array_equal(rows["float32"], arrays["float32"][:9])


# Who owns what.


@given(data=st.data(), count=st.integers(1, 9), nodes=st.integers(0, 300))
def test_owners_against_numpy(data: st.DataObject, count: int, nodes: int) -> None:
    of = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=nodes, max_size=nodes)), np.uint8)
    host = data.draw(st.integers(0, count - 1))
    owners = Owners("t", of, host, count)
    own = np.flatnonzero(of == host)
    assert owners.rows == len(own)
    ids = np.array(data.draw(st.lists(st.integers(0, max(0, nodes - 1)), max_size=40)), np.int64)
    ids = ids[:0] if nodes == 0 else ids
    for number, positions in enumerate(owners.split(ids)):
        np.testing.assert_array_equal(positions, np.flatnonzero(of[ids] == number))
    here, elsewhere = owners.own_and_others(ids)
    np.testing.assert_array_equal(here, np.flatnonzero(of[ids] == host))
    np.testing.assert_array_equal(elsewhere, np.flatnonzero(of[ids] != host))
    mine = ids[owners.mine(ids)]
    local = owners.local(mine, np.empty(len(mine), np.int64))
    np.testing.assert_array_equal(own[local], mine)
    if len(mine) < len(ids):
        with pytest.raises(IdError, match="has no row of node"):
            owners.local(ids, np.empty(len(ids), np.int64))
    np.testing.assert_array_equal(owners.counts([ids]), np.bincount(of[ids], minlength=count))


@pytest.mark.parametrize("nodes", [65_536, 65_537, 1_048_576 + 65_600, 3 * 65_536 + 127])
@pytest.mark.parametrize(("dtype", "count"), [(np.uint8, 3), (np.uint16, 700)])
def test_owners_of_more_nodes_than_are_counted_together(nodes: int, dtype: type, count: int) -> None:
    of = np.random.default_rng(nodes).integers(0, count, nodes).astype(dtype)
    of[-3:] = host = count - 1  # the last ones are beyond the last 64 that are all there
    owners = Owners("t", of, host, count)
    own = np.flatnonzero(of == host)
    assert owners.rows == len(own)
    np.testing.assert_array_equal(owners.local(own), np.arange(len(own)))
    np.testing.assert_array_equal(owners.nodes(), own)
    for none in (nodes, -1, 1 << 62):
        with pytest.raises(IdError, match=f"has no row of node {none}"):
            owners.local(np.array([own[0], none]))
    for all_of in (host, 0):
        owners = Owners("t", np.full(nodes, all_of, dtype), host, count)
        ids = np.arange(nodes if all_of == host else 0)
        np.testing.assert_array_equal(owners.local(ids), ids)


# What goes wrong.


def ask_for_all(host: Host) -> Any:
    """Ask until something goes wrong."""
    end = time.monotonic() + SECONDS
    rng = np.random.default_rng(0)
    while time.monotonic() < end:
        ids = rng.permutation(ROWS)  # never the same twice, or what is left of before could pass for new
        host.source.submit({"float32": ids}, out=None).result(SECONDS)
    return "nothing went wrong"


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_host_that_is_gone_is_told_by_all_in_time(
    store: featstore.Store, arrays: dict[str, np.ndarray], how: str, count: int
) -> None:
    timeout = 1.5
    with hosts(store, arrays, count, timeout=timeout) as (made, wires):
        ended: dict[int, Any] = {}

        def work(number: int) -> None:
            ended[number] = each([made[number]], ask_for_all)[0], time.monotonic()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(count - 1)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        begin = time.monotonic()
        getattr(wires, how)(count - 1)
        for thread in threads:
            thread.join(SECONDS)
        for error, at in ended.values():
            assert isinstance(error, PeerError)
            assert (error.host, error.rank) == (count - 1, 10 * (count - 1))
            assert at - begin < 2 * timeout + 1.5
        with pytest.raises(PeerError):  # and from now on
            made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)
        begin = time.monotonic()
        each(made, lambda host: host.exchange.close())
        assert time.monotonic() - begin < 3


def test_a_host_that_is_heard_of_and_does_not_answer_is_late(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    """Its rows do not come, while all else that it says does."""
    timeout = 1.0
    with hosts(store, arrays, 3, timeout=timeout) as (made, _):
        made[1].local.held = True
        theirs = made[1].owners["float32"].nodes()
        begin = time.monotonic()
        asked = made[0].source.submit({"float32": theirs}, out=None)
        with pytest.raises(PeerError, match="has not answered within 1 seconds") as caught:
            asked.result(SECONDS)
        assert (
            timeout <= time.monotonic() - begin < 2 * timeout + 8
        )  # of a machine that has other things to do
        assert (caught.value.host, caught.value.rank) == (1, 10)
        (other,) = each([made[2]], ask_for_all)  # and so do those that have asked it for nothing
        assert (other.host, other.rank) == (1, 10)
        assert "has not answered within 1 seconds, as host 0 says" in str(other)
        made[1].local.held = False
        made[1].local.let_go()


def test_a_host_that_asks_for_nothing_learns_it_too(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with hosts(store, arrays, 3, timeout=1.0) as (made, wires):
        wires.freeze(2)
        end = time.monotonic() + SECONDS
        while any(made[n].exchange.error is None for n in (0, 1)) and time.monotonic() < end:
            time.sleep(0.05)
        assert [made[n].exchange.error.host for n in (0, 1)] == [2, 2]  # type: ignore[union-attr]


def test_a_reason_in_letters_that_none_can_send_is_told(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    """As systems in other languages give them; and it is there to be sent once the error is."""
    with hosts(store, arrays, 3, timeout=5.0) as (made, _):
        exchange = made[0].exchange
        exchange.fail(exchange.peer_error(1, "is gone (\udcfc\udcff)"))
        (error,) = each([made[2]], ask_for_all)
        assert isinstance(error, PeerError)
        assert error.host == 1
        assert r"is gone (\udcfc\udcff), as host 0 says" in str(error)


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_damaged_messages_are_found(store: featstore.Store, arrays: dict[str, np.ndarray], how: str) -> None:
    """Of whatever host 1 sends to host 0, after who it is, one thing is damaged: each of the first eight,
    some at the same time, as most of it is waiting."""

    def damaged(at: int) -> list[Any]:
        def meddle(source: int, to: int, number: int, data: np.ndarray) -> np.ndarray:
            if (source, to) == (1, 0) and number == at:
                if how == "cut":
                    return data[: len(data) // 2]
                data[len(data) // 3] ^= 4
            return data

        with hosts(store, arrays, 2, timeout=1.0, meddle=meddle) as (made, _):
            return each(made, ask_for_all)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(damaged, range(1, 9)))
    for at, errors in enumerate(found, 1):
        assert all(isinstance(error, PeerError) for error in errors), at
        assert errors[0].host == 1, at
        if how == "flip":
            assert "damaged" in str(errors[0]), at


def test_what_goes_wrong_where_rows_are_read_travels(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    """And the lines go on."""
    with hosts(store, arrays, 2) as (made, _):
        made[1].local.error = CorruptionError("/there/c.0", 4096, "a checksum", "another")
        with pytest.raises(CorruptionError, match=r"/there/c\.0 at byte 4096") as found:
            made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)
        assert "on host 1 (rank 10)" in found.value.__notes__
        made[1].local.error = None
        rows = made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)["float32"]
        np.testing.assert_array_equal(rows, arrays["float32"])


def test_hosts_that_have_not_the_same_refuse(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    wires, used = Wires(2), {"float32": arrays["float32"]}
    of = {"float32": (np.arange(ROWS) % 2).astype(np.uint8)}

    def come(host: int) -> Any:
        try:
            return Host(store, used, of, wires, host, 1 << 16, SECONDS, {"family": f"of {host}"})
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(come, range(2)))
    for number, error in enumerate(errors):
        assert isinstance(error, SourceError)
        assert f"host {1 - number}" in str(error)
        assert f"of {number}" in str(error)


def test_hosts_compare_more_than_a_message_has_room_for(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    """As names of thousands of tables are."""
    wires, used = Wires(2), {"float32": arrays["float32"]}
    of = {"float32": (np.arange(ROWS) % 2).astype(np.uint8)}
    names = [f"table {number}" for number in range(20_000)]

    def come(told: tuple[int, list[str]]) -> Any:
        try:
            return Host(store, used, of, wires, told[0], 1 << 16, SECONDS, {"tables": told[1]})
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(come, enumerate([names, list(names)])))
        assert all(isinstance(host, Host) for host in made), made
        list(pool.map(lambda host: host.exchange.close(), made))
        wires = Wires(2)
        refused = list(pool.map(come, enumerate([names, [*names[:-1], "another"]])))
    for error in refused:
        assert isinstance(error, SourceError)
        assert "tables differ" in str(error)
        assert len(str(error)) < 4000


def test_what_is_asked_after_closing_fails(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    """Instead of waiting for ever, while others are still served and after."""
    ids = {"float32": np.arange(ROWS)}
    with hosts(store, arrays, 2) as (made, _):
        closing = threading.Thread(target=made[0].exchange.close)
        closing.start()
        while not made[1].exchange.lines[0].bye_heard:
            time.sleep(0.01)
        with pytest.raises(ClosedError, match="closed"):
            made[0].source.submit(ids, out=None).result(SECONDS)
        rows = made[1].source.submit(ids, out=None).result(SECONDS)["float32"]
        np.testing.assert_array_equal(rows, arrays["float32"])
        made[1].exchange.close()
        closing.join(SECONDS)
        with pytest.raises(ClosedError, match="closed"):
            made[0].source.submit(ids, out=None).result(SECONDS)


def test_one_that_is_interrupted_while_it_closes_says_so(
    store: featstore.Store, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosts(store, arrays, 2) as (made, _):

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(made[0].exchange, "_say_goodbye", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made[0].exchange.close()
        with pytest.raises(PeerError, match=r"host 0 \(rank 0\) has ended with KeyboardInterrupt"):
            ask_for_all(made[1])


def test_a_host_tells_who_it_is_though_all_others_were_faster(
    store: featstore.Store, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has not begun when the others' messages are there already."""
    run = Worker._run

    def late(worker: Worker) -> None:
        if threading.current_thread().name == "featstore-tell-1":  # of host 0
            time.sleep(0.2)
        run(worker)

    monkeypatch.setattr(Worker, "_run", late)
    with hosts(store, arrays, 2) as (made, _):
        rows = made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)["float32"]
        np.testing.assert_array_equal(rows, arrays["float32"])


def test_one_that_leaves_because_of_an_error_says_so(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with hosts(store, arrays, 3) as (made, _):
        made[1].exchange.close("ended with ZeroDivisionError")
        for host in (made[0], made[2]):
            with pytest.raises(PeerError, match=r"host 1 \(rank 10\) ended with ZeroDivisionError"):
                ask_for_all(host)


def test_loaders_of_other_options_are_found(store: featstore.Store, arrays: dict[str, np.ndarray]) -> None:
    """Whichever host says first what its loader is; and those that are alike go on."""
    with hosts(store, arrays, 3, timeout=3.0) as (made, _):
        assert each(made, lambda host: host.exchange.loaders.agree(7)) == [0] * 3
        made[0].exchange.loaders.agree(8)
        made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)
        made[1].exchange.loaders.agree(9)
        for error in each(made[:2], ask_for_all):
            assert isinstance(error, PeerError)
            assert "of other options" in str(error)


def test_nothing_is_said_after_the_end(
    store: featstore.Store, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a host asks for nothing more is told before it ends, however slowly: or the others would wait."""
    with hosts(store, arrays, 2) as (made, _):
        line, say = made[0].exchange.lines[1], HostLine.say

        def slowly(one: HostLine, message: Any) -> None:
            if one is line and message.kind == ms.Kind.BYE:
                line._wake.set()
                time.sleep(0.3)
            say(one, message)

        monkeypatch.setattr(HostLine, "say", slowly)
        ends = [threading.Thread(target=host.exchange.close, daemon=True) for host in made[::-1]]
        ends[0].start()
        while not line.bye_heard:
            time.sleep(0.01)
        ends[1].start()
        for one in ends:
            one.join(SECONDS)
            assert not one.is_alive()


def test_an_answer_that_has_no_room_is_told(
    store: featstore.Store, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To who waits for it, too."""

    def no_room(*_: Any) -> None:
        raise MemoryError("no room")

    with hosts(store, arrays, 2) as (made, wires):
        monkeypatch.setattr(RowsAsk, "_put", no_room)
        with pytest.raises(MemoryError, match="no room"):
            made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)
        wires.kill(0)


def test_an_error_of_many_words_arrives_shorter(
    store: featstore.Store, arrays: dict[str, np.ndarray]
) -> None:
    with hosts(store, arrays, 2) as (made, _):
        made[1].local.error = CorruptionError("/there", 0, "x" * 100_000, "another")
        with pytest.raises(featstore.errors.FeatstoreError, match="CorruptionError: corrupt data in /there"):
            made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)
        made[1].local.error = None
        made[0].source.submit({"float32": np.arange(ROWS)}, out=None).result(SECONDS)


# Messages.


@given(st.binary(max_size=20_000), st.integers(0, 10**9))
def test_what_is_changed_in_a_message_is_seen(data: bytes, where: int) -> None:
    raw = ms.message(len(data))
    raw[ms.HEADER_BYTES :] = np.frombuffer(data, np.uint8)
    ms.seal(raw, ms.Kind.ROWS, 7, 3)
    found = ms.parse_header(raw)
    assert found[:4] == (ms.Kind.ROWS, 7, 3, len(data))
    assert ms.body_of(found, raw).tobytes() == data
    raw[where % len(raw)] ^= 1 << (where % 8)
    with pytest.raises(FormatError):
        ms.body_of(ms.parse_header(raw), raw)


def test_the_memory_of_lines(store: featstore.Store) -> None:
    with pytest.raises(BudgetError) as found:
        body_bytes_for(store, ["long"], 1000, 4)
    needed = found.value.needed_bytes
    assert body_bytes_for(store, ["long"], needed, 4) == ms.padded(40_000)
    assert body_bytes_for(store, ["uint8"], 1 << 30, 2) == 8 << 20


def test_rows_that_cannot_be_put_away_fail_their_request_alone() -> None:
    """Whoever sent them has done no wrong, and the line goes on."""

    class NoMemory(Ask):
        rows = 1

        def message(self) -> np.ndarray:
            return np.empty(0, np.uint8)

        def wrong(self, body: np.ndarray) -> str:
            return ""

        def _put(self, body: np.ndarray) -> None:
            raise MemoryError("no memory")

    request = Request(lambda: "rows")
    request.begin()
    ask = NoMemory(request)
    request.close_piece(None, None)
    ask.fill(np.empty(4, np.uint8))
    assert ask.over
    with pytest.raises(MemoryError, match="no memory"):
        request.result()


def test_epochs_that_have_no_number_are_refused() -> None:
    with pytest.raises(ArgumentError, match="epochs of a loader"):
        LoadersOfHosts.say_steps(None, 0, 2**40, 3)  # type: ignore[arg-type]
