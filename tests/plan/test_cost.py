"""The device model: gaps worth bridging, forecasts, and where calibrated models are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import FormatError
from featstore.plan import cost
from featstore.plan.cost import (
    DEFAULT,
    DeviceModel,
    calibrated_engine,
    device_key,
    device_model,
    load_model,
    load_models,
    models_path,
    save_model,
)

PAGE = 4096


@given(st.floats(1e-7, 1e-2), st.floats(1e-11, 1e-6))
def test_a_gap_is_bridged_while_that_is_cheaper(read_seconds: float, byte_seconds: float) -> None:
    model = DeviceModel(read_seconds, byte_seconds, 0.0)
    gap = model.gap_pages_max
    assert gap * PAGE * byte_seconds <= read_seconds * (1 + 1e-9)
    assert (gap + 1) * PAGE * byte_seconds >= read_seconds * (1 - 1e-9)


def test_forecast_is_additive() -> None:
    model = DeviceModel(1e-5, 1e-9, 1e-3)
    assert model.seconds(0, 0) == 0.0
    assert model.seconds(10, 40_960) == pytest.approx(1e-3 + 1e-4 + 40_960e-9)


def test_the_default_bridges_four_pages() -> None:
    assert DEFAULT.gap_pages_max == 4
    assert not DEFAULT.calibrated


def test_models_are_kept_and_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path / "new"))
    assert load_models() == {}
    a, b = DeviceModel(1e-5, 1e-9, 0.0), DeviceModel(2e-5, 1e-9, 0.0)
    assert save_model("a", a) == tmp_path / "new" / "devices.json"
    save_model("b", b)
    assert load_models() == {"a": a, "b": b}
    assert load_model("b") == b
    assert load_model("c") is DEFAULT
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["devices.json"]


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEATSTORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_path() == tmp_path / "featstore" / "devices.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_path() == Path.home() / ".cache" / "featstore" / "devices.json"


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"a": 1}', '{"a": {"read_seconds": 1e-5}}',
        '{"a": {"read_seconds": 1e-5, "byte_seconds": 0, "request_seconds": 0}}',
        '{"a": {"read_seconds": -1, "byte_seconds": 1e-9, "request_seconds": 0}}',
        '{"a": {"read_seconds": 1e-5, "byte_seconds": 1e-9, "request_seconds": 0, "more": 1}}',
        '{"a": {"read_seconds": 1e-5, "byte_seconds": 1e-9, "request_seconds": 0, "engine": "mmap"}}',
    ],
)  # fmt: skip
def test_a_bad_file_of_models_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path))
    (tmp_path / "devices.json").write_text(text)
    with pytest.raises(FormatError, match=r"devices\.json.*featstore calibrate"):
        load_model("a")


def test_a_key_tells_device_engine_and_access(tmp_path: Path) -> None:
    key = device_key(tmp_path, "uring", "direct")
    device = tmp_path.stat().st_dev
    assert key.startswith(f"{os.major(device)}:{os.minor(device)}-")
    assert key.endswith("/uring/direct")
    assert key == device_key(tmp_path, "uring", "direct")
    assert key != device_key(tmp_path, "threads", "direct") != device_key(tmp_path, "threads", "buffered")


def test_another_device_of_the_same_number_has_not_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks that come and go get each other's numbers."""
    key = device_key(tmp_path, "uring", "direct")
    real = os.statvfs(tmp_path)

    class Other:
        f_fsid = real.f_fsid + 1

    monkeypatch.setattr(os, "statvfs", lambda _: Other)
    assert device_key(tmp_path, "uring", "direct") != key
    monkeypatch.undo()
    monkeypatch.setattr(cost, "_sectors", lambda _: "12345")
    assert device_key(tmp_path, "uring", "direct") != key


def test_a_device_without_a_size_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_BLOCK_DEVICES", tmp_path)
    assert device_key(tmp_path, "uring", "direct").endswith("-/uring/direct")


def test_the_fastest_engine_is_kept_for_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path))
    assert calibrated_engine(tmp_path) is None
    uring, threads = DeviceModel(1e-5, 1e-9, 0.0), DeviceModel(2e-6, 1e-9, 0.0)
    save_model(device_key(tmp_path, "uring", "direct"), uring)
    save_model(device_key(tmp_path, "threads", "direct"), threads)
    assert device_model(tmp_path) == uring
    measured = DeviceModel(2e-6, 1e-9, 0.0, engine="threads", engine_rates={"uring": 1e5, "threads": 4e5})
    save_model(device_key(tmp_path, "auto", "direct"), measured)
    assert calibrated_engine(tmp_path) == (
        "threads", "calibrated: reads of a page a second, 400,000 through threads, 100,000 through uring"
    )  # fmt: skip
    assert device_model(tmp_path) == threads


def test_models_of_before_are_read_and_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They have fewer fields, and keys that name no file system."""
    monkeypatch.setenv("FEATSTORE_CACHE", str(tmp_path))
    number = tmp_path.stat().st_dev
    old = f"{os.major(number)}:{os.minor(number)}/uring/direct"
    model = {"read_seconds": 1e-5, "byte_seconds": 1e-9, "request_seconds": 0}
    models_path().write_text(json.dumps({old: model}))
    assert load_models() == {old: DeviceModel(1e-5, 1e-9, 0.0)}
    assert device_model(tmp_path) is DEFAULT


@pytest.mark.parametrize("engine", ["threads", "mmap"])
def test_through_mappings_no_gap_is_read(engine: str, tmp_path: Path) -> None:
    """Pages that nobody looks at are not read there, whatever a calibration found: every second page is an
    extent of its own, where another engine reads through them."""
    rows = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)  # a page each
    model = DeviceModel(read_seconds=1e-5, byte_seconds=1e-9, request_seconds=0.0, gap_pages=8)
    with (
        featstore.pack(tmp_path / "store", rows) as store,
        store.reader(memory="16MiB", static=None, engine=engine, model=model) as reader,
    ):
        ids = np.arange(0, 64, 2)
        reads = reader.plan(ids).reads
        assert reads == 32 if engine == "mmap" else reads < 8
        assert np.array_equal(reader.read(ids), rows[ids])
        assert reader.stats().reads == reads
