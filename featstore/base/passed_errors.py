"""Errors from one process to another, as JSON: the name of a class of :mod:`featstore.errors` and what it was
made of, so that they arrive as the same type with the same message. Nothing is pickled."""

from __future__ import annotations

import json

from featstore import errors
from featstore.errors import FeatstoreError, FormatError


def encode_error(error: BaseException, where: str) -> bytes:
    """An error as JSON. One that is not of :mod:`featstore.errors` becomes the nearest class that is, its own
    name in the message, and ``where`` it was raised."""
    name = type(error).__name__
    if name in errors.__all__ and type(error) is getattr(errors, name):
        reduced = error.__reduce__()
        return json.dumps({"type": name, "arguments": list(reduced[1])}, default=str).encode()
    nearest = next(
        (c.__name__ for c in type(error).__mro__ if c.__name__ in errors.__all__), "FeatstoreError"
    )
    if nearest in _OF_MESSAGE:
        message = f"{error}" if nearest != "FeatstoreError" else f"{name} in {where}: {error}"
        return json.dumps({"type": nearest, "arguments": [message]}).encode()
    return json.dumps({"type": "FeatstoreError", "arguments": [f"{name} in {where}: {error}"]}).encode()


_ERRORS = frozenset(name for name in errors.__all__ if issubclass(getattr(errors, name), FeatstoreError))

#: Classes that are made of their message alone.
_OF_MESSAGE = _ERRORS - {"CorruptionError", "DeviceError", "DiskFullError", "BudgetError", "PeerError"}


def decode_error(text: bytes) -> FeatstoreError:
    """The error that :func:`encode_error` was given."""
    said = json.loads(text)
    if said["type"] not in _ERRORS:
        raise FormatError(f"another process speaks of an unknown error {said['type']!r}")
    error: FeatstoreError = getattr(errors, said["type"])(*said["arguments"])
    return error
