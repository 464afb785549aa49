"""Byte sizes as people write them: ``"2GiB"``, ``"512 MB"``, ``1 << 20``."""

from __future__ import annotations

import math
import re

from featstore.errors import ArgumentError

PAGE_BYTES = 4096

_UNITS = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "kb": 10**3,
    "kib": 2**10,
    "m": 2**20,
    "mb": 10**6,
    "mib": 2**20,
    "g": 2**30,
    "gb": 10**9,
    "gib": 2**30,
    "t": 2**40,
    "tb": 10**12,
    "tib": 2**40,
}


SIZE_MAX = 2**62


def parse_bytes(size: int | float | str, name: str = "a size") -> int:
    """A size in bytes from a number of bytes or a text such as ``"1.5GiB"``, ``"300MB"``, ``"64k"`` (k =
    KiB). Parts of a byte are left out.

    Raises ArgumentError, a ValueError, for anything else, and for sizes that are not positive or that no
    machine has; ``name``: of the argument.
    """
    from featstore.arguments import as_number, shown

    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", size) if len(size) <= 80 else None
        if match is None or match.group(2).lower() not in _UNITS:
            raise ArgumentError(
                f"{name}: cannot read {shown(size)} as a size; write for example 512MiB, 2GiB or a "
                "number of bytes"
            )
        number = float(match.group(1)) * _UNITS[match.group(2).lower()]
    else:
        number = (
            size if isinstance(size, int) and not isinstance(size, bool) else as_number(size, name, -math.inf)
        )
    if not 1 <= number <= SIZE_MAX:
        raise ArgumentError(f"{name} must be positive, and at most 4 EiB, not {shown(size)}")
    return int(number)


def format_bytes(size: float) -> str:
    """A size for people, in binary units: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


#: The longest single read; bandwidth no longer grows beyond it.
EXTENT_BYTES_MAX = 512 * 1024


def multiple_bytes(value: int | str, whole_bytes: int, name: str) -> int:
    """A limit in bytes: bytes, a size, 0, or a multiple of ``whole_bytes`` as ``"3x"``. Raises
    ArgumentError."""
    if isinstance(value, str) and value.strip().lower().endswith("x"):
        try:
            times = float(value.strip()[:-1])
        except ValueError:
            times = -1.0
        if not 0 <= times < 1e9:
            raise ArgumentError(
                f"{name} must be a size or a multiple of the tables such as '3x', not {value!r}"
            )
        return int(times * whole_bytes)
    try:
        nothing = isinstance(value, int | str) and not isinstance(value, bool) and value in (0, "0")
        return 0 if nothing else parse_bytes(value, name)
    except ValueError as error:
        raise ArgumentError(
            f"{name} must be a size or a multiple of the tables such as '3x': {error}"
        ) from None
