"""What is asked for together is one request below; each of those who asked has its own end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from featstore.errors import CancelledError, ClosedError
from featstore.testing import ArraySource, check_source
from featstore.tiers.bundle import Bundle

ROWS = 50
SECONDS = 20.0


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {name: rng.standard_normal((ROWS, 3), np.float32) for name in ("a", "b", "c")}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, pack: Any, arrays: Any) -> Any:
    with pack(tmp_path_factory.mktemp("bundle") / "s", arrays) as made:
        yield made


class Disk(ArraySource):
    """Counts requests, and may refuse them."""

    def __init__(self, store: Any, arrays: Any) -> None:
        super().__init__(store, arrays)
        self.requests: list[list[str]] = []
        self.made: list[Any] = []
        self.refusal: Exception | None = None

    def submit(self, ids: Any, *, out: Any, at: Any = None) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(list(ids))
        self.made.append(super().submit(ids, out=out, at=at))
        return self.made[-1]


def ask(bundle: Bundle, name: str, ids: np.ndarray) -> tuple[Any, np.ndarray]:
    """A request into memory that is longer, back to front; and that memory."""
    rows = np.full((2 * ROWS, 3), -1, np.float32)
    at = np.arange(len(ids), dtype=np.int32)[::-1] + ROWS
    return bundle.submit({name: ids}, out={name: rows}, at={name: at}), rows


def is_there(rows: np.ndarray, wanted: np.ndarray) -> bool:
    return np.array_equal(rows[ROWS : ROWS + len(wanted)][::-1], wanted) and (rows[:ROWS] == -1).all()


def test_tables_asked_for_together_are_one_request(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    bundle, ids = Bundle(disk), {"a": np.arange(7), "b": np.arange(9) * 3, "c": np.arange(0)}
    with bundle.together():
        asked = {name: ask(bundle, name, wanted) for name, wanted in ids.items()}
        assert disk.requests == []
        assert not any(request.done() for request, _ in asked.values())
    assert disk.requests == [["a", "b", "c"]]
    for name, (request, rows) in asked.items():
        assert request.result(SECONDS)[name] is rows
        assert is_there(rows, arrays[name][ids[name]])


def test_outside_and_of_the_same_table_each_goes_by_itself(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    bundle, ids = Bundle(disk), np.arange(5)
    check_source(bundle, arrays, requests=4)
    disk.requests.clear()
    with bundle.together():
        first, rows = ask(bundle, "a", ids)
        second, other = ask(bundle, "a", ids + 5)
        fresh = bundle.submit({"b": ids}, out=None)
        assert disk.requests == [["a"], ["b"]]
        np.testing.assert_array_equal(fresh.result(SECONDS)["b"], arrays["b"][ids])
    assert disk.requests == [["a"], ["b"], ["a"]]
    first.result(SECONDS)
    second.result(SECONDS)
    assert is_there(rows, arrays["a"][ids])
    assert is_there(other, arrays["a"][ids + 5])
    with bundle.together():
        pass
    assert len(disk.requests) == 3


def test_nothing_is_read_of_what_was_cancelled_before(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    bundle = Bundle(disk)
    with bundle.together():
        gone, untouched = ask(bundle, "a", np.arange(5))
        kept, rows = ask(bundle, "b", np.arange(5))
        assert gone.cancel()
    assert disk.requests == [["b"]]
    assert gone.cancelled()
    kept.result(SECONDS)
    assert is_there(rows, arrays["b"][:5])
    assert (untouched == -1).all()
    with bundle.together():
        assert ask(bundle, "a", np.arange(5))[0].cancel()
    assert disk.requests == [["b"]]


def test_one_that_is_cancelled_later_leaves_the_others_their_rows(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    disk.held, bundle = True, Bundle(disk)
    with bundle.together():
        gone, kept = ask(bundle, "a", np.arange(5))[0], ask(bundle, "b", np.arange(5))
    assert gone.cancel()
    assert gone.cancel()  # once more is not another's
    assert not gone.done()  # its memory may still be written to
    disk.let_go()
    assert gone.cancelled()
    kept[0].result(SECONDS)
    assert is_there(kept[1], arrays["b"][:5])


def test_where_all_are_cancelled_so_is_the_request_below(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    disk.held, bundle = True, Bundle(disk)
    with bundle.together():
        asked = [ask(bundle, name, np.arange(5)) for name in "ab"]
    for request, _ in asked:
        request.cancel()
    disk.let_go()
    assert disk.made[0].cancelled()
    assert all(request.cancelled() and (rows == -1).all() for request, rows in asked)


def test_one_that_was_given_up_before_is_not_read(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    bundle = Bundle(disk)
    with bundle.together():
        gone, untouched = ask(bundle, "a", np.arange(5))
        kept, rows = ask(bundle, "b", np.arange(5))
        gone.abandon()
        assert gone.cancelled()
    assert disk.requests == [["b"]]
    kept.result(SECONDS)
    assert is_there(rows, arrays["b"][:5])
    assert (untouched == -1).all()


def test_an_error_is_told_to_all(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    disk.error, bundle = OSError("the disk"), Bundle(disk)
    with bundle.together():
        asked = [ask(bundle, name, np.arange(5))[0] for name in "abc"]
    assert [request.exception(SECONDS) for request in asked] == [disk.error] * 3
    disk.error, disk.refusal = None, ClosedError("it is closed")
    with pytest.raises(ClosedError, match="it is closed"), bundle.together():
        asked = [ask(bundle, name, np.arange(5))[0] for name in "abc"]
    assert [request.exception(SECONDS) for request in asked] == [disk.refusal] * 3


def test_what_ends_with_an_error_asks_for_nothing(store: Any, arrays: Any) -> None:
    disk = Disk(store, arrays)
    bundle, asked = Bundle(disk), []

    def ask_and_fail() -> None:
        with bundle.together():
            asked.append(ask(bundle, "a", np.arange(5)))
            raise KeyError("b")

    with pytest.raises(KeyError):
        ask_and_fail()
    assert disk.requests == []
    assert isinstance(asked[0][0].exception(SECONDS), CancelledError)
    assert is_there(ask(bundle, "a", np.arange(3))[1], arrays["a"][:3])
    bundle.close()
    with pytest.raises(ClosedError):
        ask(bundle, "a", np.arange(3))
