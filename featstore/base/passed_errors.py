"""Errors from one process to another, as JSON: the name of a class of :mod:`featstore.errors` and what it was
made of, so that they arrive as the same type with the same message. Nothing is pickled."""

from __future__ import annotations

import json

from featstore import errors
from featstore.errors import FeatstoreError, FormatError


def encode_error(error: BaseException, where: str) -> bytes:
    """An error as JSON. One that is not of :mod:`featstore.errors` becomes the nearest class that is, its own
    name in the message, and ``where`` it was raised. Its notes go along."""
    said = _said(error, where)
    notes = [note for note in getattr(error, "__notes__", []) if isinstance(note, str)]
    return json.dumps(said | ({"notes": notes} if notes else {}), default=str).encode()


def _said(error: BaseException, where: str) -> dict[str, object]:
    name = type(error).__name__
    if name in errors.__all__ and type(error) is getattr(errors, name):
        reduced = error.__reduce__()
        return {"type": name, "arguments": list(reduced[1])}
    nearest = next(
        (c.__name__ for c in type(error).__mro__ if c.__name__ in errors.__all__), "FeatstoreError"
    )
    if nearest in _OF_MESSAGE:
        message = f"{error}" if nearest != "FeatstoreError" else f"{name} in {where}: {error}"
        return {"type": nearest, "arguments": [message]}
    return {"type": "FeatstoreError", "arguments": [f"{name} in {where}: {error}"]}


_ERRORS = frozenset(name for name in errors.__all__ if issubclass(getattr(errors, name), FeatstoreError))

#: Classes that are made of their message alone.
_OF_MESSAGE = _ERRORS - {"CorruptionError", "DeviceError", "DiskFullError", "BudgetError", "PeerError"}


def decode_error(text: bytes) -> FeatstoreError:
    """The error that :func:`encode_error` was given."""
    said = json.loads(text)
    if said["type"] not in _ERRORS:
        raise FormatError(f"another process speaks of an unknown error {said['type']!r}")
    error: FeatstoreError = getattr(errors, said["type"])(*said["arguments"])
    for note in said.get("notes", ()):
        error.add_note(str(note))
    return error
