"""How an engine is chosen: by probing, and never in silence."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from featstore import engine
from featstore.engine import ENGINES, EngineChoice, EngineName, choose, engine_class, liburing, make
from featstore.errors import ArgumentError, EngineError


def test_choices() -> None:
    assert choose("threads") == EngineChoice("threads", "asked for")
    assert choose("mmap") == EngineChoice("mmap", "asked for")
    assert choose("auto") == EngineChoice("uring", "io_uring works here")
    assert choose("uring") == EngineChoice("uring", "asked for")
    with pytest.raises(
        ValueError, match="engine must be one of 'auto', 'uring', 'threads', 'mmap', not 'aio'"
    ):
        choose("aio")


def test_every_engine_has_its_name_in_the_table() -> None:
    assert get_args(EngineName) == ENGINES
    for name in ENGINES:
        assert engine_class(name).name == name  # type: ignore[arg-type]


def test_the_command_knows_every_engine() -> None:
    """It spells them out, because importing the package to show its help would take too long."""
    sys.path.append(str(Path(__file__).parents[2] / "tools"))
    from featstore_cli import calibrate, options

    def choices(command: Any) -> list[str]:
        option = next(one for one in command.params if one.name == "engine")
        return list(option.type.choices)

    assert choices(click.command()(options.engine_option(lambda: None))) == ["auto", *ENGINES]
    assert choices(calibrate.command) == ["auto", "all", *ENGINES]


def test_a_further_engine_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is it taken for another one, nor is its probe passed by."""

    def refuse() -> None:
        raise OSError(95, "no such thing here")

    entry = engine._TABLE["threads"]
    monkeypatch.setitem(engine._TABLE, "further", replace(entry, probe=refuse))  # type: ignore[arg-type,misc]
    monkeypatch.setattr(engine, "ENGINES", (*ENGINES, "further"))
    with pytest.raises(EngineError, match="the engine 'further' cannot be used: no such thing here; ask for"):
        choose("further")
    monkeypatch.setitem(engine._TABLE, "further", entry)  # type: ignore[arg-type,misc]
    assert choose("further") == EngineChoice("further", "asked for")  # type: ignore[arg-type]
    assert engine_class("further") is engine_class("threads")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["aio", "auto", None])
def test_nothing_is_made_for_an_unknown_name(name: Any) -> None:
    with pytest.raises(ArgumentError, match="engine must be one of 'uring', 'threads', 'mmap', not"):
        make(name, 8, 2**20, 2**16)


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
