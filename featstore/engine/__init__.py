"""Engines: who performs the reads? io_uring, threads, mmap: one contract, picked by probing.

:func:`choose` names the engine that serves and says why; nothing falls back in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from featstore.arguments import as_choice
from featstore.errors import EngineError

if TYPE_CHECKING:
    from featstore.engine.base import Engine

EngineName = Literal["uring", "threads", "mmap"]
ENGINES: tuple[str, ...] = get_args(EngineName)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that serves, and why."""

    name: EngineName
    because: str


def choose(wanted: str = "auto") -> EngineChoice:
    """The engine to use: ``wanted``, or with ``"auto"`` io_uring where it works and else threads.

    Raises ArgumentError, a ValueError, for an unknown name and EngineError, an OSError, where the engine
    asked for cannot work here.
    """
    as_choice(wanted, "engine", ("auto", *ENGINES))
    if wanted in ("threads", "mmap"):
        return EngineChoice(cast(EngineName, wanted), "asked for")
    from featstore.engine import liburing

    try:
        liburing.probe()
    except OSError as error:
        if wanted == "uring":
            raise EngineError(
                f"the engine 'uring' cannot be used: {error.strerror or error}; ask for 'threads', or "
                "'auto' for what works here"
            ) from error
        return EngineChoice("threads", f"io_uring cannot be used: {error.strerror or error}")
    return EngineChoice("uring", "asked for" if wanted == "uring" else "io_uring works here")


def make(name: EngineName, queue_depth: int, staging_bytes: int, extent_bytes_max: int) -> Engine:
    """An engine of this name, started. Raises OSError where it cannot work here."""
    if name == "uring":
        from featstore.engine.uring import UringEngine

        return UringEngine(queue_depth, staging_bytes, extent_bytes_max)
    from featstore.engine.pool import MappedEngine, ThreadsEngine

    return (ThreadsEngine if name == "threads" else MappedEngine)(
        queue_depth, staging_bytes, extent_bytes_max
    )
