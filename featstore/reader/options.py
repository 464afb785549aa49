"""How a reader may be told to read: the options that whoever opens one hands on."""

from __future__ import annotations

import os
from typing import Any

from featstore.arguments import as_choice, as_count, as_flag, shown
from featstore.base.environment import Unsaid, variable
from featstore.base.logs import LOG
from featstore.engine import ENGINES, EngineChoice, choose, engine_said
from featstore.errors import ArgumentError
from featstore.plan.cost import DeviceModel, calibrated_engine
from featstore.units import parse_bytes

#: Options of a reader that whoever opens one hands on.
READING = ("engine", "model", "queue_depth", "threads", "verify")

#: Those of samplers from disk.
SAMPLERS_READING = tuple(name for name in READING if name != "model")

QUEUE_DEPTH_MAX = 4096
READING_THREADS_MAX = 256


def check_reading(
    engine: Any = "auto", queue_depth: Any = 128, verify: Any = True, model: Any = None, threads: Any = None
) -> None:
    """How a reader is to read; see :class:`featstore.reader.reader.Reader`."""
    as_choice(engine, "engine", ("auto", *ENGINES))
    if engine == "auto":
        engine_said()
    as_count(queue_depth, "queue_depth", 1, QUEUE_DEPTH_MAX)
    as_flag(verify, "verify")
    if threads is not None:
        as_count(threads, "threads", 1, READING_THREADS_MAX)
    if not isinstance(model, DeviceModel | None):
        raise ArgumentError(f"model must be a DeviceModel or None, not {shown(model)}")


def chosen_engine(
    path: str | os.PathLike[str], engine: str, model: DeviceModel | None, threads: int | None
) -> EngineChoice:
    """Who reads; ``"auto"`` as ``FEATSTORE_ENGINE`` says, else as calibrated for the device that holds
    ``path``. Not as calibrated where the caller brings a model, or bounds the threads: of few threads
    io_uring alone keeps many reads under way."""
    if engine == "auto" and (said := engine_said()):
        return choose(said, because="FEATSTORE_ENGINE says so")
    plain = engine != "auto" or model is not None or threads is not None
    return choose(engine, None if plain else calibrated_engine(path))


def memory_said(given: int | str) -> tuple[int | str, str]:
    """What ``memory=`` is, and why: in place of its default what ``FEATSTORE_MEMORY`` says. Raises
    ArgumentError, a ValueError, where that is no size."""
    if not isinstance(given, Unsaid):
        return given, "asked for"
    text = variable("FEATSTORE_MEMORY")
    if not text:
        return str(given), "by default"
    parse_bytes(text, "FEATSTORE_MEMORY")
    LOG.info("memory %s: FEATSTORE_MEMORY says so", text)
    return text, "FEATSTORE_MEMORY says so"


def as_memory(given: int | str) -> int:
    """Bytes of ``memory=``, by :func:`memory_said`. Raises ArgumentError, a ValueError."""
    return parse_bytes(memory_said(given)[0], "memory")


def as_static_bytes(given: int | str | None) -> int | None:
    """What static rows may take: bytes or a size, 0 for none of them, None for what is left."""
    if given is None or (type(given) is int and given == 0):  # True is no number, False no size
        return given  # type: ignore[return-value]
    return parse_bytes(given, "static_memory")
