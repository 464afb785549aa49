"""Byte sizes as people write them: ``"2GiB"``, ``"512 MB"``, ``1 << 20``."""

from __future__ import annotations

import math
import re

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


def parse_bytes(size: int | float | str) -> int:
    """A size in bytes from a number of bytes or a text such as ``"1.5GiB"``, ``"300MB"``, ``"64k"`` (k = KiB).

    Raises ValueError for anything else, and for sizes that are not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match.group(2).lower() not in _UNITS:
            raise ValueError(f"cannot read {size!r} as a size; write for example 512MiB, 2GiB or a number of bytes")
        value = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    else:
        value = int(size) if math.isfinite(size) else 0
    if value <= 0:
        raise ValueError(f"a size must be positive, not {size!r}")
    return value


def format_bytes(size: float) -> str:
    """A size for people, in binary units: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
