"""What a caller may give: the rules of the public functions' arguments, each in one place.

They are asked where an argument enters the package, once, not where it is used. What breaks a rule raises an
:class:`featstore.errors.ArgumentError` that names the argument, what it takes and what it was given. Nothing
is guessed: True is no number, 3.7 no count, and a text is no list of its characters.
"""

from __future__ import annotations

import importlib
import inspect
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

from featstore.errors import ArgumentError, MissingPackageError, UnknownNameError

#: Beyond this no count or size makes sense, and 64 bits would not hold it with a sign.
INT64_MAX = 2**63 - 1
T = TypeVar("T")


def shown(value: Any) -> str:
    """A value in a message, in a few words whatever it is: texts and numbers as they are, of the rest the
    type, dtype and shape."""
    if value is None or isinstance(value, bool | str | bytes | int | float):
        text = (
            repr(value)
            if not isinstance(value, int) or value.bit_length() < 256
            else "a number of very many digits"
        )
        return text if len(text) <= 80 else f"{text[:76]} ..."
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and kind.__name__ != "ndarray":
        return repr(value)
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        beside = f" of {dtype}" if dtype is not None else ""
        beside += f" {list(shape)}" if isinstance(shape, Iterable) else ""
    except Exception:  # an object that cannot say: a nested tensor has no shape
        beside = ""
    return f"a {kind.__name__}{beside}"


def as_integer(value: Any, name: str, least: int | None = None, most: int | None = None) -> int:
    """A whole number within bounds, if there are any, of any integer type."""
    try:
        number = None if isinstance(value, bool) or not _is_number(value) else operator.index(value)
    except (
        TypeError,
        RuntimeError,
    ):  # a tensor of several numbers, or one that has none (torch's meta device)
        number = None
    if number is None:
        raise ArgumentError(f"{name} must be a whole number, not {shown(value)}")
    if least is not None and number < least:
        bound = {0: "must not be negative", 1: "must be at least 1"}.get(least, f"must be at least {least:,}")
        raise ArgumentError(f"{name} {bound}, not {shown(number)}")
    if most is not None and number > most:
        raise ArgumentError(f"{name} must be at most {most:,}, not {shown(number)}")
    return number


def _is_number(value: Any) -> bool:
    """Whether a value may stand for one number: an array or tensor of booleans, or of a shape, does not."""
    dtype = getattr(value, "dtype", None)
    return dtype is None or ("bool" not in str(dtype) and tuple(getattr(value, "shape", ())) == ())


def as_count(value: Any, name: str, least: int = 1, most: int = INT64_MAX) -> int:
    """How many: a whole number, by default at least 1."""
    return as_integer(value, name, least, most)


def as_number(
    value: Any, name: str, least: float = 0.0, most: float = math.inf, *, above: bool = False
) -> float:
    """A finite number within bounds; with ``above`` not the lower bound itself."""
    try:
        number = math.nan if isinstance(value, bool | str | bytes) or not _is_number(value) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number > most or number < least or (above and number == least):
        bounds = f"{'more than' if above else 'at least'} {least:g}" + (
            f" and at most {most:g}" * (most < math.inf)
        )
        raise ArgumentError(f"{name} must be a number of {bounds}, not {shown(value)}")
    return number


def as_flag(value: Any, name: str) -> bool:
    """True or False."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise ArgumentError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def as_choice(value: Any, name: str, choices: Iterable[str], beside: str = "") -> str:
    """One of some names; the message has the nearest. ``beside``: what else may be given, for the message."""
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    raise ArgumentError(
        f"{name} must be one of {', '.join(map(repr, known))}{beside}, not {shown(value)}{near(value, known)}"
    )


def as_text(value: Any, name: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{name} must be a text, not {shown(value)}")
    return value


def as_path(value: Any, name: str) -> str:
    """A path as text: a str or an ``os.PathLike`` of one."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise ArgumentError(f"{name} must be a path, a str or an os.PathLike of one, not {shown(value)}")
    if not path or "\0" in path:
        raise ArgumentError(f"{name} is no path: {path!r}")
    return path


def as_function(value: Any, name: str) -> Callable[..., Any]:
    """Something that can be called."""
    if not callable(value):
        raise ArgumentError(f"{name} must be a function, not {shown(value)}")
    function: Callable[..., Any] = value
    return function


def as_callback(value: Any, name: str) -> Callable[..., Any] | None:
    """A function, or None."""
    return None if value is None else as_function(value, name)


def as_mapping(value: Any, name: str, what: str) -> Mapping[Any, Any]:
    """A mapping; ``what`` says of what to what."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a mapping of {what}, not {shown(value)}")
    return value


def as_sequence(value: Any, name: str, what: str) -> list[Any]:
    """The items of a list, tuple, array or another iterable of ``what``, but of no text, mapping or set."""
    if not isinstance(value, str | bytes | Mapping | Set):
        try:
            return list(value)
        except (TypeError, RuntimeError, NotImplementedError):
            pass
    raise ArgumentError(f"{name} must be a list of {what}, not {shown(value)}")


def as_batches(value: Any, name: str, *, functions: bool = True) -> Any:
    """Mini-batches: something to iterate over, but no text and no mapping; or, with ``functions``, what makes
    such a thing."""
    if isinstance(value, str | bytes | Mapping) or not (
        isinstance(value, Iterable) or (functions and callable(value))
    ):
        beside = ", or a function that makes one" if functions else ""
        raise ArgumentError(f"{name} must be an iterable of mini-batches{beside}, not {shown(value)}")
    return value


def as_table_names(value: Any, name: str) -> list[str]:
    """Names of tables, each once, at least one; of a single one the text will do."""
    names = [value] if isinstance(value, str) else as_sequence(value, name, "names of tables")
    texts = [one for one in names if isinstance(one, str)]
    if not names or len(set(texts)) < len(names):
        raise ArgumentError(
            f"{name} must be names of tables, at least one, and each once, not {shown(value)}"
        )
    return texts


def need_package(module: str, extra: str, why: str) -> Any:
    """A module of an optional package. Raises MissingPackageError, which says which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"{why} needs {package}; install it with: pip install 'featstore[{extra}]'", name=error.name
        ) from error


def need_torch(why: str) -> Any:
    """The torch module."""
    return need_package("torch", "torch", why)


def as_device(value: Any, name: str) -> Any:
    """A device of this machine that holds tensors, as torch takes it. One without a number is the current one
    of the calling thread, which other threads need not have."""
    torch = need_torch(f"{name}=")
    try:
        if value is not None and not isinstance(value, bool):
            found = torch.empty(0, device=value).device
            if found.type != "meta":
                return found
        why = "it holds no rows"
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
    raise ArgumentError(f"{name}={shown(value)} cannot be used here: {why}")


def as_fanouts(fanouts: Any) -> tuple[int, ...]:
    """Neighbours per node and hop: one number a hop, at least 1, or -1 for all."""
    given = as_sequence(fanouts, "fanouts", "numbers, one per hop")
    numbers = tuple(as_integer(one, "each of fanouts", most=2**31 - 1) for one in given)
    if not numbers or min(numbers) < -1 or 0 in numbers:
        raise ArgumentError(
            f"fanouts must be one number per hop: at least 1, or -1 for all neighbours, not {list(numbers)}"
        )
    return numbers


def near(value: Any, known: Iterable[Any]) -> str:
    """``; did you mean 'that'?`` where a name is near to one that there is."""
    found = (
        get_close_matches(value, [one for one in known if isinstance(one, str)], 1)
        if isinstance(value, str)
        else []
    )
    return f"; did you mean {found[0]!r}?" if found else ""


def known_name(name: Any, known: Iterable[Any], what: str) -> Any:
    """A name that is there, or UnknownNameError, a KeyError; ``what``: ``the store has no table``."""
    names = list(known)
    if not isinstance(name, str | tuple) or name not in names:
        raise _unknown(name, names, what)
    return name


def _unknown(name: Any, names: Sequence[Any], what: str) -> UnknownNameError:
    there = f"it has {', '.join(map(repr, names))}" if names else "it has none"
    called = name if isinstance(name, tuple) else shown(name)
    return UnknownNameError(f"{what} {called}; {there}{near(name, names)}")


class Named(dict[str, T]):
    """What there is by name. Asked for a name that is not there, it raises UnknownNameError, a KeyError,
    which says the names that are; ``what``: ``the store has no table``."""

    def __init__(self, what: str, items: Mapping[str, T]) -> None:
        super().__init__(items)
        self._what = what

    def __missing__(self, name: Any) -> T:
        raise _unknown(name, list(self), self._what)


@cache
def options_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The options that a function or class takes by name alone."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def check_options(given: Mapping[Any, Any], known: Sequence[str], who: str) -> None:
    """Raise ArgumentError for an option that is none of those ``known``, and say which is meant."""
    for name in given:
        if name not in known:
            takes = ", ".join(sorted(known)) or "none"
            raise ArgumentError(f"{who} has no option {name!r}; it takes {takes}{near(name, known)}")
