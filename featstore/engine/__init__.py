"""Engines: who performs the reads? io_uring, threads, mmap: one contract, picked by probing.

:func:`choose` names the engine that serves and says why; nothing falls back in silence. A further engine is
one entry of the table below, and its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from featstore.arguments import as_choice
from featstore.base.logs import LOG
from featstore.errors import EngineError

if TYPE_CHECKING:
    from featstore.engine.base import Engine

EngineName = Literal["uring", "threads", "mmap"]


def _uring() -> type[Engine]:
    from featstore.engine.uring import UringEngine

    return UringEngine


def _threads() -> type[Engine]:
    from featstore.engine.pool import ThreadsEngine

    return ThreadsEngine


def _mapped() -> type[Engine]:
    from featstore.engine.pool import MappedEngine

    return MappedEngine


def _probe_uring() -> None:
    from featstore.engine import liburing

    liburing.probe()


def _works_anywhere() -> None:
    pass


@dataclass(frozen=True)
class _Entry:
    """An engine: its class, imported when it is wanted, and what raises OSError where it cannot work."""

    engine: Callable[[], type[Engine]]
    probe: Callable[[], None] = _works_anywhere


_TABLE: dict[EngineName, _Entry] = {
    "uring": _Entry(_uring, _probe_uring),
    "threads": _Entry(_threads),
    "mmap": _Entry(_mapped),
}
ENGINES: tuple[str, ...] = tuple(_TABLE)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that serves, and why."""

    name: EngineName
    because: str


def choose(wanted: str = "auto", calibrated: tuple[str, str] | None = None) -> EngineChoice:
    """The engine to use: ``wanted``; with ``"auto"`` the ``calibrated`` one (its name, and why), and without
    one io_uring where it works and else threads.

    Raises ArgumentError, a ValueError, for an unknown name and EngineError, an OSError, where the engine
    asked for cannot work here.
    """
    as_choice(wanted, "engine", ("auto", *ENGINES))
    because = "asked for"
    if wanted == "auto":
        name, because = calibrated or ("uring", "io_uring works here")
        as_choice(name, "the calibrated engine", ENGINES)
    else:
        name = wanted
    try:
        _TABLE[cast(EngineName, name)].probe()
    except OSError as error:
        why = error.strerror or error
        if wanted == "auto":
            LOG.info("engine threads, because io_uring cannot be used: %s", why)
            return EngineChoice("threads", f"io_uring cannot be used: {why}")
        raise EngineError(
            f"the engine {name!r} cannot be used: {why}; ask for 'threads', or 'auto' for what works here"
        ) from error
    LOG.info("engine %s: %s", name, because)
    return EngineChoice(cast(EngineName, name), because)


def engine_class(name: EngineName) -> type[Engine]:
    """The class of an engine. Raises ArgumentError for an unknown name."""
    return _TABLE[cast(EngineName, as_choice(name, "engine", ENGINES))].engine()


def make(
    name: EngineName, queue_depth: int, staging_bytes: int, extent_bytes_max: int, threads: int | None = None
) -> Engine:
    """An engine of this name, started. ``threads``: as many read at most; by default as many as the engine
    takes. Raises ArgumentError for an unknown name, and OSError where it cannot work here."""
    made: Engine = engine_class(name)(queue_depth, staging_bytes, extent_bytes_max, threads)  # type: ignore[arg-type]
    return made
