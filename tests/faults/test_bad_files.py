"""Spoiled chunk files under an open reader: who asks for a bad page is told where it is, everybody else reads
on."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import CorruptionError

PAGE = 4096
MEMORY = "4MiB"


def chunk(store: Path, number: int) -> Path:
    return store / f"g000001/tables/features/rows/c.{number}.0"


def spoil(path: Path, at: int, mask: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))
        file.flush()
        os.fsync(file.fileno())


def nodes_on_page(store: featstore.Store, number: int, page: int) -> np.ndarray:
    """Ids of the nodes with a byte on a page of a chunk file."""
    table = store.tables["features"]
    at = number * table.layout.chunk_bytes + page * PAGE
    rows = np.arange(table.rows)
    touched = (rows * 400 < at + PAGE) & ((rows + 1) * 400 > at)
    return table.node_of_row()[touched]


@pytest.mark.parametrize(("number", "page"), [(0, 0), (1, 12), (3, 2), (3, 22)])
def test_only_requests_that_touch_a_bad_page_fail(
    own: Path, features: np.ndarray, engine: str, number: int, page: int
) -> None:
    with featstore.open(own) as store:
        bad = nodes_on_page(store, number, page)
        good = np.setdiff1d(np.arange(1000), bad)
        for opened_before in (True, False):
            reader = store.reader(memory=MEMORY, engine=engine) if opened_before else None
            spoil(chunk(own, number), page * PAGE + 77)
            with reader or store.reader(memory=MEMORY, engine=engine) as used:
                for ids in (bad, bad[:1], bad[-1:], np.arange(1000)):
                    with pytest.raises(CorruptionError) as caught:
                        used.read(ids)
                    assert (caught.value.path, caught.value.offset) == (str(chunk(own, number)), page * PAGE)
                    assert "featstore verify" in str(caught.value)
                np.testing.assert_array_equal(used.read(good), features[good])
            with store.reader(memory=MEMORY, engine=engine, verify=False) as careless:
                got = careless.read(np.arange(1000))
                assert (got.view(np.uint8) != features.view(np.uint8)).sum() == 1
            spoil(chunk(own, number), page * PAGE + 77)
            with store.reader(memory=MEMORY, engine=engine) as healed:
                np.testing.assert_array_equal(healed.read(np.arange(1000)), features)


@given(st.integers(0, 1000 * 400 - 1), st.integers(1, 255), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_any_flipped_bit_is_found_or_not_asked_for(
    packed: Path,
    tmp_path_factory: pytest.TempPathFactory,
    engine: str,
    features: np.ndarray,
    at: int,
    mask: int,
    seed: int,
) -> None:
    import shutil

    own = Path(shutil.copytree(packed, tmp_path_factory.mktemp("flip") / "s"))
    with featstore.open(own) as store:
        number, within = divmod(at, store.tables["features"].layout.chunk_bytes)
        bad = nodes_on_page(store, number, within // PAGE)
        spoil(chunk(own, number), within, mask)
        ids = np.random.default_rng(seed).integers(0, 1000, 20)
        with store.reader(memory=MEMORY, engine=engine) as reader:
            if np.isin(ids, bad).any():
                with pytest.raises(CorruptionError) as caught:
                    reader.read(ids)
                assert (caught.value.path, caught.value.offset) == (
                    str(chunk(own, number)),
                    within // PAGE * PAGE,
                )
            else:
                np.testing.assert_array_equal(reader.read(ids), features[ids])
    shutil.rmtree(own)


def test_pages_in_each_others_place_are_found(own: Path, engine: str) -> None:
    """Right bytes from a wrong place: checksums outside the page see that."""
    a, b = chunk(own, 0), chunk(own, 1)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    with (
        featstore.open(own) as store,
        store.reader(memory=MEMORY, engine=engine) as reader,
        pytest.raises(CorruptionError) as caught,
    ):
        reader.read(np.arange(1000))
    assert caught.value.path in (str(a), str(b))


@pytest.mark.parametrize("left", [0, PAGE, PAGE + 1, 30_000])
def test_files_cut_under_an_open_reader(own: Path, features: np.ndarray, engine: str, left: int) -> None:
    with featstore.open(own) as store, store.reader(memory=MEMORY, engine=engine) as reader:
        np.testing.assert_array_equal(reader.read(np.arange(1000)), features)
        os.truncate(chunk(own, 2), left)
        with pytest.raises(CorruptionError) as caught:
            reader.read(np.arange(1000))
        assert caught.value.path == str(chunk(own, 2))
        if engine != "mmap":
            node_of_row = store.tables["features"].node_of_row()
            others = node_of_row[: 2 * store.tables["features"].layout.rows_per_chunk]
            np.testing.assert_array_equal(reader.read(others), features[others])


def test_files_removed_under_an_open_reader(own: Path, features: np.ndarray, engine: str) -> None:
    """Descriptors hold them; who comes later is told."""
    with featstore.open(own) as store, store.reader(memory=MEMORY, engine=engine) as reader:
        chunk(own, 2).unlink()
        np.testing.assert_array_equal(reader.read(np.arange(1000)), features)
        with pytest.raises(CorruptionError, match="no file"):
            store.reader(memory=MEMORY, engine=engine)


def test_files_exchanged_between_opening_store_and_reader(own: Path, tmp_path: Path, engine: str) -> None:
    with featstore.open(own) as store:
        path = chunk(own, 3)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CorruptionError, match="symbolic link"):
            store.reader(memory=MEMORY, engine=engine)
        path.unlink()
        path.write_bytes(b"short")
        with pytest.raises(CorruptionError, match="found 5 bytes"):
            store.reader(memory=MEMORY, engine=engine)


def test_a_foreign_checksum_file(own: Path, engine: str) -> None:
    path = own / "g000001/tables/features/page_checksums/c.0"
    path.write_bytes(np.zeros(path.stat().st_size, np.uint8).tobytes())
    with featstore.open(own) as store, pytest.raises(CorruptionError, match="digest"):
        store.reader(memory=MEMORY, engine=engine)


def test_a_bad_page_met_by_the_static_tier_opens_no_reader(own: Path, engine: str) -> None:
    with featstore.open(own) as store:
        bad = nodes_on_page(store, 1, 5)
        spoil(chunk(own, 1), 5 * PAGE)
        with pytest.raises(CorruptionError) as caught:
            store.reader(memory=MEMORY, engine=engine, static=bad)
        assert caught.value.offset == 5 * PAGE
        others = np.setdiff1d(np.arange(1000), bad)
        store.reader(memory=MEMORY, engine=engine, static=others).close()
