"""Through mappings a page is checked when it has come into memory, and is trusted as long as it stays there:
whatever the page cache does meanwhile, no wrong row is ever given."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import featstore
from featstore.base.files import direct_refusal
from featstore.errors import CorruptionError

PAGE, ROW = 4096, 512
PAGES, PER_PAGE = 80, PAGE // ROW
ROWS = PAGES * PER_PAGE


class Table:
    """A store of one table, and its one chunk file, which the device changes below the page cache."""

    def __init__(self, folder: Path) -> None:
        self.rows = np.random.default_rng(0).integers(0, 256, (ROWS, ROW), np.uint8)
        self.store = featstore.pack(folder / "x.fs", self.rows)
        self.file = self.store.path / self.store.tables["features"].entry.chunk_path(0)
        self.reader = self.store.reader(engine="mmap", static=None)
        self.wrong: set[int] = set()
        self._block = mmap.mmap(-1, PAGE)  # aligned, for direct I/O

    def close(self) -> None:
        self.reader.close()
        self.store.close()

    def write(self, page: int, wrong: bool) -> None:
        """The device has other bytes there, or the right ones; the page cache none."""
        right = self.rows[page * PER_PAGE : (page + 1) * PER_PAGE].tobytes()
        self._block[:] = bytes([right[0] ^ 1]) + right[1:] if wrong else right
        descriptor = os.open(self.file, os.O_RDWR | os.O_DIRECT)
        try:
            assert os.pwrite(descriptor, self._block, page * PAGE) == PAGE
        finally:
            os.close(descriptor)
        (self.wrong.add if wrong else self.wrong.discard)(page)

    def cache(self, page: int, count: int) -> None:
        """Another process reads pages, and they are in the page cache."""
        with self.file.open("rb", buffering=0) as file:
            file.seek(page * PAGE)
            file.read(count * PAGE)

    def read(self, pages: list[int]) -> None:
        """The rows of these pages are right, or an error says which is not."""
        ids = np.array([page * PER_PAGE + page % PER_PAGE for page in pages], np.int64)
        if self.wrong.isdisjoint(pages):
            np.testing.assert_array_equal(self.reader.read(ids), self.rows[ids])
            return
        with pytest.raises(CorruptionError) as raised:
            self.reader.read(ids)
        assert raised.value.offset is not None
        assert raised.value.offset // PAGE in self.wrong.intersection(pages)

    def trusted(self) -> bool:
        """Whether pages are noted as checked now."""
        return self.reader._states["features"].files.checked is not None

    def settle(self) -> None:
        """All pages are in memory, and checked."""
        for _ in range(3):
            self.read(list(range(PAGES)))
        assert self.trusted()


@pytest.fixture
def table(tmp_path: Path) -> Table:
    table = Table(tmp_path)
    if direct_refusal(table.file, PAGES * PAGE):
        pytest.skip("the file system refuses direct I/O, so pages cannot be changed below the page cache")
    return table


def test_pages_that_stayed_in_memory_are_not_checked_again(table: Table) -> None:
    table.settle()
    checked = table.reader._states["features"].files.checked
    assert checked is not None
    assert np.unpackbits(checked.bits, bitorder="little")[:PAGES].all()
    # What is changed in memory, by whoever writes to the file, is not seen, as with rows of a tier.
    with table.file.open("r+b", buffering=0) as file:
        file.write(bytes([table.rows[0, 0] ^ 1]))
    assert table.reader.read(np.array([0]))[0, 0] == table.rows[0, 0] ^ 1
    table.close()


def test_a_page_that_came_anew_is_checked(table: Table) -> None:
    table.settle()
    table.write(17, wrong=True)
    table.read([3, 17, 40])
    table.write(17, wrong=False)
    table.read([3, 17, 40])
    table.close()


def test_a_page_that_came_with_its_neighbour_is_checked(table: Table) -> None:
    """The system maps pages of the cache around one that is looked up: it is in memory then, and nobody
    waits for it."""
    table.settle()
    table.write(17, wrong=True)
    table.write(18, wrong=False)
    table.cache(16, 4)
    table.read([18])
    assert not table.trusted()
    table.read([17])
    table.close()


def test_a_page_that_came_before_a_wrong_one_is_checked(table: Table) -> None:
    """Both are of one extent, of which the first is trusted, and nobody has checked the second yet."""
    for _ in range(3):
        table.read(list(range(17)))
    assert table.trusted()
    table.write(16, wrong=True)
    table.write(17, wrong=True)
    table.read([16, 17])
    for page in (16, 17):
        table.read([page])
    table.close()


def test_what_comes_while_bits_are_made_ends_the_trust_in_them(table: Table) -> None:
    """A page that a read of another thread, which began before, has come upon."""
    table.settle()
    files = table.reader._states["features"].files
    before = int(files.faults[0])
    table.write(17, wrong=True)
    files.faults[0] += 1  # as that read counts it
    with pytest.raises(CorruptionError):
        table.reader.read(np.array([17 * PER_PAGE]))
    assert files.faults[0] > before
    table.close()


def test_bits_take_no_more_than_they_were_given(table: Table) -> None:
    table.read([0])
    table.reader._engine._checked_bytes = 9  # a byte short of a bit a page
    for _ in range(3):
        table.read(list(range(PAGES)))
    assert not table.trusted()
    table.write(17, wrong=True)
    table.read([17])
    table.close()


_STEPS = st.one_of(
    st.tuples(st.just("read"), st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=60, unique=True)),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("write"), st.tuples(st.integers(0, PAGES - 1), st.booleans())),
    st.tuples(st.just("cache"), st.tuples(st.integers(0, PAGES - 1), st.integers(1, 8))),
)


@given(steps=st.lists(_STEPS, max_size=25))
@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_wrong_row_is_given(table: Table, steps: list[tuple[str, object]]) -> None:
    """A model: each page is right or wrong on the device."""
    for step, value in steps:
        if step == "settle":
            if not table.wrong:
                table.settle()
        elif step == "read":
            table.read(value)  # type: ignore[arg-type]
        else:
            getattr(table, step)(*value)  # type: ignore[misc]
    for page in list(table.wrong):
        table.write(page, wrong=False)
    table.settle()
