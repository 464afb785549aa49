"""What commands share on the command line: options, types of values, ``[TABLE=]VALUE``, reading node ids."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])

_TABLE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.\-]{0,127})=(.*)", re.DOTALL)


@dataclass
class Settings:
    """What holds for the whole invocation."""

    quiet: bool = False
    debug: bool = False
    packing: Path | None = (
        None  # what is being written, a store or a trace, so that an interruption can say how to go on
    )
    what: str = "the pack"

    def resumable(self) -> bool:
        """Whether what was under way has left something to go on from."""
        from featstore.errors import FeatstoreError

        if self.packing is None:
            return False
        try:
            if self.what == "the split":
                from featstore.packing.split.directory import can_go_on

                return can_go_on(Path(os.path.realpath(self.packing)))
            return any(any(self.packing.glob(name)) for name in ("g*.journal", "recording.log"))
        except (OSError, FeatstoreError):  # what the error to be told is of
            return False


def settings(ctx: click.Context | None = None) -> Settings:
    """The settings of this invocation."""
    found: Settings = (ctx or click.get_current_context()).find_root().ensure_object(Settings)
    return found


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            setattr(settings(ctx), name, True)

    return callback


def shared_options(function: F) -> F:
    """``-q`` and ``--debug``, which work before and after the command's name."""
    quiet = click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=_set("quiet"),
        help="No progress and no remarks; only data and errors.",
    )
    debug = click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set("debug"), help="Show tracebacks of errors."
    )
    return quiet(debug(function))


def json_option(function: F) -> F:
    """``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON with a versioned schema instead of text."
    )(function)


def engine_option(function: F) -> F:
    """``--engine``."""
    choice = click.Choice(["auto", "uring", "threads", "mmap"])
    return click.option(
        "--engine", type=choice, default="auto", show_default=True, help="Who performs the reads."
    )(function)


class Size(click.ParamType):  # type: ignore[type-arg]
    """A size in bytes, as people write it."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from featstore.base.environment import Unsaid
        from featstore.reader.options import as_memory
        from featstore.units import parse_bytes

        try:
            return as_memory(value) if isinstance(value, Unsaid) else parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Shape(click.ParamType):  # type: ignore[type-arg]
    """A shape: ``-1,128`` or ``1000x128``."""

    name = "shape"

    def parse(self, text: str) -> tuple[int, ...]:
        """Raises ValueError for what is not a shape."""
        parts = re.split(r"\s*[,x×]\s*", text.strip().strip("()[]").rstrip(",").strip())
        try:
            shape = tuple(int(part) for part in parts)
        except ValueError:
            raise ValueError(f"{text!r} is not a shape; write for example -1,128 or 1000000,128") from None
        if any(extent < 1 for extent in shape[1:]) or (shape[0] < 1 and shape[0] != -1):
            raise ValueError(
                f"the shape {text} is impossible: numbers must be positive, the first may be -1 for as "
                "many as the file has"
            )
        return shape


SIZE = Size()
SHAPE = Shape()


def split_table(text: str, *, is_path: bool = False) -> tuple[str | None, str]:
    """``TABLE=VALUE`` as (table, value); (None, text) where no table is named. A path that exists as it
    stands is a path.
    """
    match = _TABLE.fullmatch(text)
    if match is None or (is_path and os.path.exists(text)):
        return None, text
    return match.group(1), match.group(2)


def by_table(values: Iterable[str], option: str, *, is_path: bool = False) -> dict[str | None, str]:
    """Values of a repeated ``[TABLE=]VALUE`` option by table; None is the table of those that name none."""
    found: dict[str | None, str] = {}
    for text in values:
        table, value = split_table(text, is_path=is_path)
        if not value:
            raise click.BadParameter(f"nothing follows the = in {text!r}", param_hint=option)
        if table in found:
            whose = "without a table's name" if table is None else f"for table {table!r}"
            raise click.BadParameter(f"given twice {whose}", param_hint=option)
        found[table] = value
    return found


def of_table(given: Mapping[str | None, str], table: str) -> str | None:
    """What is given for a table, by name or for all."""
    return given.get(table, given.get(None))


def check_tables(given: Mapping[str | None, Any], tables: Iterable[str], option: str) -> None:
    """A usage error for a value whose table does not exist."""
    known = list(tables)
    for table in given:
        if table is not None and table not in known:
            raise click.BadParameter(
                f"no table is called {table!r}; there is {', '.join(map(repr, known))}", param_hint=option
            )


def chosen_table(store: Any, name: str | None) -> Any:
    """The table of a store that ``--table`` names; without it, the only one. A usage error otherwise."""
    known = ", ".join(map(repr, store.tables)) or "none"
    if name is None:
        if len(store.tables) != 1:
            raise click.UsageError(
                f"the store has {len(store.tables)} tables; say which with --table: {known}"
            )
        return next(iter(store.tables.values()))
    if name not in store.tables:
        raise click.BadParameter(f"the store has no table {name!r}; it has {known}", param_hint="--table")
    return store.tables[name]


def is_given(name: str) -> bool:
    """Whether an option is on the command line, whatever its value."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def read_ids(path: Path) -> Any:
    """Node ids from a ``.npy`` file, or from text: numbers with white space or commas between them.

    Raises SourceError for anything else.
    """
    import numpy as np

    from featstore.base.files import load_given
    from featstore.errors import SourceError

    if path.suffix.lower() == ".npy":
        try:
            ids = load_given(path)
        except ValueError as error:
            raise SourceError(f"cannot read node ids from {path}: {error}") from None
        if ids.dtype.kind not in "iu":
            raise SourceError(f"{path} holds {ids.dtype}; node ids are integers")
        if ids.ndim != 1:
            raise SourceError(f"{path} holds {ids.dtype} {list(ids.shape)}; node ids have one axis")
        return ids
    try:
        words = path.read_text().replace(",", " ").split()
        return np.array([int(word) for word in words], np.int64)
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        raise SourceError(
            f"cannot read node ids from {path}: {error}; give a .npy file, or text with one id a line"
        ) from None
