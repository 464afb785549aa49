"""How a reader may be told to read: the options that whoever opens one hands on."""

from __future__ import annotations

import os
from typing import Any

from featstore.arguments import as_choice, as_count, as_flag, shown
from featstore.engine import ENGINES, EngineChoice, choose
from featstore.errors import ArgumentError
from featstore.plan.cost import DeviceModel, calibrated_engine
from featstore.units import parse_bytes

#: Options of a reader that whoever opens one hands on.
READING = ("engine", "model", "queue_depth", "threads", "verify")


QUEUE_DEPTH_MAX = 4096
READING_THREADS_MAX = 256


def check_reading(
    engine: Any = "auto", queue_depth: Any = 128, verify: Any = True, model: Any = None, threads: Any = None
) -> None:
    """How a reader is to read; see :class:`featstore.reader.reader.Reader`."""
    as_choice(engine, "engine", ("auto", *ENGINES))
    as_count(queue_depth, "queue_depth", 1, QUEUE_DEPTH_MAX)
    as_flag(verify, "verify")
    if threads is not None:
        as_count(threads, "threads", 1, READING_THREADS_MAX)
    if not isinstance(model, DeviceModel | None):
        raise ArgumentError(f"model must be a DeviceModel or None, not {shown(model)}")


def chosen_engine(
    path: str | os.PathLike[str], engine: str, model: DeviceModel | None, threads: int | None
) -> EngineChoice:
    """Who reads; ``"auto"`` as calibrated for the device that holds ``path``. Not where the caller brings a
    model, or bounds the threads: of few threads io_uring alone keeps many reads under way."""
    plain = engine != "auto" or model is not None or threads is not None
    return choose(engine, None if plain else calibrated_engine(path))


def as_static_bytes(given: int | str | None) -> int | None:
    """What static rows may take: bytes or a size, 0 for none of them, None for what is left."""
    if given is None or (type(given) is int and given == 0):  # True is no number, False no size
        return given  # type: ignore[return-value]
    return parse_bytes(given, "static_memory")
