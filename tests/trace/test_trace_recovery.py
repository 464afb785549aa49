"""A recording that is interrupted, killed or failed at any moment goes on to the same bytes; a trace is not
replaced unasked."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_support import QuickDisk, batches_of, record

import featstore
from featstore.errors import (
    CorruptionError,
    FormatError,
    IncompleteStoreError,
    SourceError,
    StoreExistsError,
    StoreLockedError,
)
from featstore.storage.disk import Disk
from featstore.storage.generations import writer_lock
from featstore.trace import recorder
from featstore.trace.log_file import how_far
from featstore.trace.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
from disks import FailingDisk, Lost, RecordingDisk, crash_states, materialise

# Overwriting, locking, resuming.


def test_a_trace_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "t"
    old = record(batches_of(4), path)
    with pytest.raises(StoreExistsError, match="already holds a trace"):
        record(batches_of(5), path)
    with pytest.raises(StoreExistsError, match="was completed"):
        record(batches_of(5), path, resume=True)
    with pytest.raises(SourceError, match="contradict"):
        record(batches_of(5), path, resume=True, overwrite=True)

    def broken() -> Iterator[Any]:
        yield from batches_of(2)
        assert len(Trace(path)) == 4, "the old one stands until the new one is complete"
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        record(broken(), path, overwrite=True)
    assert len(Trace(path)) == 4
    with pytest.raises(StoreExistsError, match="unfinished recording"):
        record(batches_of(5), path)
    record(batches_of(5), path, resume=True).close()
    assert len(Trace(path)) == 5
    assert [ids[""].tolist() for ids, _ in old] == [ids.tolist() for ids, _ in batches_of(4)], (
        "who has it open goes on reading it"
    )


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(IncompleteStoreError, match="there is no trace"):
        Trace(tmp_path / "none")
    with pytest.raises(IncompleteStoreError, match=r"no trace\.log"):
        Trace(tmp_path)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(IncompleteStoreError, match="nothing to resume"):
            record(batches_of(1), path, resume=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "featstore.json").write_text("{}")
    with pytest.raises(StoreExistsError, match="is a store"):
        record(batches_of(1), tmp_path, overwrite=True)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.mkdir()
    with writer_lock(path), pytest.raises(StoreLockedError, match="being written"):
        record(batches_of(1), path)


def interrupted(path: Path, whole: list[Any], after: int, **options: Any) -> None:
    """Leave an unfinished recording of ``after`` mini-batches."""

    def some() -> Iterator[Any]:
        yield from whole[:after]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(some(), path, **options)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and checkpoints of a few frames."""
    monkeypatch.setattr(recorder, "_HOLD_BYTES", 1500)
    monkeypatch.setattr(recorder, "LOG_CHECKPOINT_BYTES", 4000)


@pytest.mark.usefixtures("small")
def test_resuming_checks_what_it_goes_on_with(tmp_path: Path) -> None:
    path, whole = tmp_path / "t", batches_of(12)
    interrupted(path, whole, 9, fingerprint={"seed": 1, "by": "me"})
    with pytest.raises(IncompleteStoreError, match="unfinished recording: go on with resume"):
        Trace(path)
    far = how_far(path)
    assert far.batches == 9
    assert far.fingerprint == {"seed": 1, "by": "me"}
    for other, text in (
        ({"seed": 2, "by": "me"}, "seed = 1, this one has 2"),
        ({"seed": 1}, "by = 'me', this one has None"),
        ({"seed": 1, "by": "me", "x": None}, "x = None"),
    ):
        with pytest.raises(SourceError, match=text):
            record(whole, path, resume=True, fingerprint=other)
    with pytest.raises(SourceError, match="drop"):
        record(whole, path, resume=True, drop=())
    changed = list(whole)
    changed[far.batches - 1] = (np.array([1, 2, 3]), None)
    with pytest.raises(SourceError, match=f"mini-batch {far.batches - 1}, the last one recorded, is not"):
        record(changed, path, resume=True)
    with pytest.raises(SourceError, match="more than the 2"):
        record(whole[:2], path, resume=True)
    with pytest.raises(SourceError, match="more than the 2"):
        record(iter(whole), path, resume=True, limit=2)
    with pytest.raises(SourceError, match="the last one recorded"):
        record(iter(whole[:2]), path, resume=True)
    record(whole, tmp_path / "u", fingerprint={"seed": 1, "by": "me"}).close()
    record(iter(whole), path, resume=True).close()
    assert (path / "trace.log").read_bytes() == (tmp_path / "u" / "trace.log").read_bytes()


class _Counted(Sequence[Any]):
    """A sequence that notes what was asked for."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.asked = batches, list[int]()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return self.batches[index]


@pytest.mark.usefixtures("small")
def test_of_a_sequence_only_what_is_missing_is_made(tmp_path: Path) -> None:
    path, whole = tmp_path / "t", batches_of(12)
    interrupted(path, whole, 9)
    done = how_far(path).batches
    counted = _Counted(whole)
    record(counted, path, resume=True).close()
    assert counted.asked == list(range(done - 1, 12))


@pytest.mark.usefixtures("small")
def test_damage_before_the_checkpoint_is_no_torn_end(tmp_path: Path) -> None:
    path, whole = tmp_path / "t", batches_of(12)
    interrupted(path, whole, 10)
    log = path / "recording.log"
    state, raw = json.loads((path / "recording.json").read_text()), log.read_bytes()
    assert 0 < state["bytes"] < len(raw)
    for place in (70, state["bytes"] - 1, 0):
        log.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with pytest.raises(CorruptionError):
            record(whole, path, resume=True)
        if place < 100:  # the last one is in a sample, at which only verifying looks
            with pytest.raises(CorruptionError):
                how_far(path)
    log.write_bytes(raw[: state["bytes"] - 64])
    with pytest.raises(CorruptionError, match="durable bytes"):
        record(whole, path, resume=True)
    (path / "recording.json").write_text("{")
    log.write_bytes(raw)
    with pytest.raises(FormatError, match="cannot read"):
        record(whole, path, resume=True)
    (path / "recording.json").write_text(json.dumps(state))
    log.write_bytes(
        raw[: state["bytes"]] + b"\xff" * (len(raw) - state["bytes"])
    )  # behind the checkpoint anything may be
    with record(whole, path, resume=True) as trace:
        assert len(trace) == 12
        assert featstore.verify(trace.path).ok


# Killed anywhere.

WHOLE = batches_of(14, 20)
FINGERPRINT = {"seed": 5}


def do_record(path: Path, disk: Disk | None = None, **options: Any) -> None:
    Trace.record(WHOLE, path, disk=disk or QuickDisk(), fingerprint=FINGERPRINT, **options).close()


def finish(path: Path) -> None:
    """Go on from whatever is there."""
    try:
        do_record(path, resume=True)
    except IncompleteStoreError:
        do_record(path)  # killed before anything worth resuming
    except StoreExistsError as error:
        assert "was completed" in str(error)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("over", [False, True])
def test_killed_at_any_operation_then_resumed(tmp_path: Path, over: bool) -> None:
    do_record(tmp_path / "reference")
    wanted = (tmp_path / "reference" / "trace.log").read_bytes()
    path = tmp_path / "t"
    for at in itertools.count():
        shutil.rmtree(path, ignore_errors=True)
        if over:
            record(batches_of(3), path).close()
        try:
            do_record(path, FailingDisk(at), overwrite=over)
            break
        except Lost:
            pass
        if over:  # killed a second time, on the way
            try:
                do_record(path, FailingDisk(4), resume=True)
            except (Lost, IncompleteStoreError, StoreExistsError):
                assert len(Trace(path)) in (3, 14)
            if (
                Trace(path).uuid == record(batches_of(3), tmp_path / "three", overwrite=True).uuid
                and not (path / "recording.log").exists()
            ):
                do_record(path, overwrite=True)
        finish(path)
        assert (path / "trace.log").read_bytes() == wanted, at
        assert not (path / "recording.log").exists()
    assert at > 20


@pytest.mark.usefixtures("small")
def test_every_crash_state_can_go_on(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    do_record(tmp_path / "recorded", disk)
    wanted = (tmp_path / "recorded" / "trace.log").read_bytes()
    ops = [op for op in disk.ops if op.path.split("/")[0] in ("recorded", ".")]
    committed = max(i for i, op in enumerate(ops) if op.kind == "rename" and op.target.endswith("trace.log"))
    states = list(crash_states(ops))
    chosen = np.random.default_rng(1).permutation(len(states))[:150]
    opened = resumed = 0
    for label, kept in (states[k] for k in chosen):
        materialise(kept, tmp_path / "state")
        path = tmp_path / "state" / "recorded"
        if (path / "trace.log").exists():
            opened += 1
        else:
            assert int(label.split(":")[0]) <= committed + 1, label
            resumed += (path / "recording.json").exists()
            finish(path)
        assert (path / "trace.log").read_bytes() == wanted, label
    assert opened > 2
    assert resumed > 30


@pytest.mark.usefixtures("small")
def test_failures_are_reported_and_leave_what_can_be_resumed(tmp_path: Path) -> None:
    do_record(tmp_path / "reference")
    wanted = (tmp_path / "reference" / "trace.log").read_bytes()
    for code, at in itertools.product([5, 28], range(0, 40, 3)):
        path = tmp_path / f"{code}-{at}"
        try:
            do_record(path, FailingDisk(at, code))
        except OSError as error:
            assert error.errno == code
            assert str(path) in str(error) or str(tmp_path) in str(error)
        finish(path)
        assert (path / "trace.log").read_bytes() == wanted
