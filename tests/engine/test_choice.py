"""How an engine is chosen: by probing, and never in silence."""

from __future__ import annotations

import pytest

from featstore.engine import ENGINES, EngineChoice, choose, liburing, make


def test_choices() -> None:
    assert choose("threads") == EngineChoice("threads", "asked for")
    assert choose("mmap") == EngineChoice("mmap", "asked for")
    assert choose("auto") == EngineChoice("uring", "io_uring works here")
    assert choose("uring") == EngineChoice("uring", "asked for")
    assert set(ENGINES) == {"uring", "threads", "mmap"}
    with pytest.raises(
        ValueError, match="engine must be one of 'auto', 'uring', 'threads', 'mmap', not 'aio'"
    ):
        choose("aio")


def test_a_kernel_that_forbids_io_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, entries: int) -> None:
        raise OSError(1, "io_uring_setup: Operation not permitted")

    monkeypatch.setattr(liburing._Library, "open_ring", refuse)
    assert choose("auto") == EngineChoice(
        "threads", "io_uring cannot be used: io_uring_setup: Operation not permitted"
    )
    with pytest.raises(OSError, match="not permitted"):
        choose("uring")
    with pytest.raises(OSError, match="not permitted"):
        make("uring", 8, 2**20, 2**16)


def test_without_the_wheel_or_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liburing, "_library", None)
    monkeypatch.setattr(liburing, "_library_path", lambda: None)
    choice = choose("auto")
    assert choice.name == "threads"
    assert "'liburing' is not installed" in choice.because
    monkeypatch.undo()
    monkeypatch.setattr(liburing, "_library", None)
    monkeypatch.setattr(liburing, "_FUNCTIONS", (*liburing._FUNCTIONS, "io_uring_of_the_future"))
    choice = choose("auto")
    assert choice.name == "threads"
    assert "lacks io_uring_of_the_future" in choice.because


def test_a_real_refusal() -> None:
    """More entries than a ring may have: the kernel itself says no, and the engine's constructor raises
    it."""
    with pytest.raises(OSError, match="io_uring_setup"):
        make("uring", 10**6, 2**20, 2**16)
