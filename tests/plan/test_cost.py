"""The device model: gaps worth bridging, forecasts, and where calibrated models are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.errors import FormatError
from featstore.plan.cost import (
    DEFAULT,
    DeviceModel,
    device_key,
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
    assert key == f"{device >> 8 & 0xFFF}:{device & 0xFF}/uring/direct" or key.endswith("/uring/direct")
    assert key != device_key(tmp_path, "threads", "direct") != device_key(tmp_path, "threads", "buffered")
