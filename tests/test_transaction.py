"""A generation as a transaction: what stays after an error, and what is gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import DiskFullError, SourceError, StoreExistsError
from featstore.storage.disk import Disk
from featstore.storage.journal import TableProgress
from featstore.storage.transaction import Transaction, write_generation


class Interrupted(Exception):
    pass


def worth(progress: TableProgress, error: BaseException) -> bool:
    return progress.done and not isinstance(error, ValueError)


def write(store: Path, error: BaseException, *, done: bool, **options: Any) -> None:
    """Begin a generation, get as far as ``done`` says, and fail."""
    given = {"resume": False, "overwrite": False} | options
    with write_generation(store, Disk(), worth=worth, **given) as transaction:
        transaction.start({"of": "this"})
        transaction.journal.table("x").done = done
        transaction.journal.save()
        transaction.catalogue.write(f"{transaction.name}/tables/zarr.json", b"{}")
        transaction.disk.mkdir(transaction.generation.spill)
        raise error


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


@pytest.mark.parametrize(
    ("error", "done", "stays"),
    [(Interrupted(), False, False), (ValueError(), True, False), (Interrupted(), True, True)],
)
def test_what_is_worth_it_stays_after_an_error(
    tmp_path: Path, error: Exception, done: bool, stays: bool
) -> None:
    with pytest.raises(type(error)):
        write(tmp_path, error, done=done)
    assert names(tmp_path) == (["g000001", "g000001.journal", "g000001.spill"] if stays else [])


def test_an_interrupted_one_is_gone_on_with_and_never_abandoned(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        write(tmp_path, Interrupted(), done=True)
    with pytest.raises(StoreExistsError, match="unfinished"):
        Transaction(tmp_path, Disk(), resume=False, overwrite=False)
    transaction = Transaction(tmp_path, Disk(), resume=True, overwrite=False)
    assert (transaction.name, transaction.resumed) == ("g000001", True)
    with pytest.raises(SourceError, match="of = 'this'"):
        transaction.start({"of": "that"})
    with pytest.raises(Interrupted):
        write(tmp_path, Interrupted(), done=False, resume=True)
    assert names(tmp_path) == ["g000001", "g000001.journal", "g000001.spill"]


def test_room_is_asked_for_less_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "free_bytes", lambda self, path: 10_000)
    transaction = Transaction(tmp_path, Disk(), resume=False, overwrite=False)
    assert transaction.bytes_there(transaction.generation.directory) == 0
    transaction.start({})
    transaction.catalogue.write(f"{transaction.name}/tables/x", np.zeros(8192, np.uint8))
    there = transaction.bytes_there(transaction.generation.directory, transaction.generation.spill)
    assert there >= 8192
    transaction.check_space(10_000)
    with pytest.raises(DiskFullError, match="10,001"):
        transaction.check_space(10_001)
