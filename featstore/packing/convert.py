"""From a source's rows to a table's: casts, and a report of what the values are.

Features are cast only when asked, and only to floating types; the report counts NaN and Inf, and what a cast
did to finite values (overflow to Inf, underflow to zero). Minimum and maximum come first and are vectorised;
values are counted one by one only in blocks where those two are not finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.arguments import shown
from featstore.base.compilation import njit
from featstore.base.dtypes import Scalar, bfloat16, is_bfloat16
from featstore.errors import FormatError, SourceError

CASTS = ("float16", "bfloat16", "float32", "float64")


def target_dtype(source: np.dtype[Any], wanted: str | None) -> np.dtype[Any]:
    """The dtype of the table. Raises SourceError for a cast that is not offered."""
    if wanted is None:
        return source.newbyteorder("<")
    if wanted not in CASTS:
        raise SourceError(
            f"cannot cast to {wanted!r}; choose one of {', '.join(CASTS)}, or leave the dtype as it is"
        )
    if source.kind not in "biuf" and not is_bfloat16(source):
        raise SourceError(f"cannot cast {source} to {wanted}: only numbers can be cast")
    return bfloat16() if wanted == "bfloat16" else np.dtype(wanted).newbyteorder("<")


@njit(cache=True, nogil=True)
def half_range(bits: NDArray[np.uint16], infinity: int, out: NDArray[np.int64]) -> None:
    """Range of 16-bit floats by their bits. ``infinity``: 0x7C00 (float16) or 0x7F80 (bfloat16).

    out: smallest and largest finite value as sign-magnitude integers (their order is that of the values),
    NaNs, Infs.
    """
    low, high, nans, infs = 1 << 20, -(1 << 20), 0, 0
    for i in range(bits.shape[0]):
        magnitude = int(bits[i]) & 0x7FFF
        if magnitude >= infinity:
            if magnitude > infinity:
                nans += 1
            else:
                infs += 1
        else:
            value = int(-magnitude if bits[i] & 0x8000 else magnitude)
            low = min(low, value)
            high = max(high, value)
    out[0], out[1], out[2], out[3] = low, high, nans, infs


def _half_value(order: int, dtype: np.dtype[Any]) -> float:
    bits = np.array([(abs(order) | (0x8000 if order < 0 else 0))], np.uint16)
    return float(bits.view(dtype)[0])


class ValueReport:
    """Counts over all values of a table, block by block; :meth:`result` is what the manifest keeps."""

    def __init__(self, source: np.dtype[Any], target: np.dtype[Any]) -> None:
        self.source = source
        self.target = target
        self.cast = source.newbyteorder("<") != target
        self.numeric = source.kind in "biuf" or is_bfloat16(source)
        self.minimum: Any = None
        self.maximum: Any = None
        self.nan = self.inf = self.overflowed = self.underflowed = 0

    def convert(self, block: NDArray[Any]) -> NDArray[Any]:
        """The block in the table's dtype (the same array where nothing is cast), counted."""
        if not self.numeric:
            if block.dtype.kind == "c":
                self._count(block.view(block.real.dtype))
            return block
        nan, inf = self._count(block)
        if not self.cast:
            return block
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out = block.astype(self.target)
        narrower = self.target.itemsize < block.dtype.itemsize or is_bfloat16(block.dtype)
        if narrower or block.dtype.kind in "iu":
            self._compare(block, out, nan, inf)
        return out

    def _count(self, block: NDArray[Any]) -> tuple[int, int]:
        """NaNs and Infs of this block; the range grows by its finite values."""
        if block.size == 0:
            return 0, 0
        if block.dtype.itemsize == 2 and (block.dtype.kind == "f" or is_bfloat16(block.dtype)):
            return self._count_half(block)
        low, high = block.min(), block.max()
        nan = inf = 0
        if block.dtype.kind == "f" and not (np.isfinite(low) and np.isfinite(high)):
            nan, inf = int(np.isnan(block).sum()), int(np.isinf(block).sum())
            finite = block[np.isfinite(block)]
            if finite.size == 0:
                self._add(nan, inf, None, None)
                return nan, inf
            low, high = finite.min(), finite.max()
        if block.dtype.kind == "f":  # an item of a longdouble would be no Python number
            self._add(nan, inf, float(low), float(high))
        else:
            self._add(nan, inf, low.item(), high.item())
        return nan, inf

    def _count_half(self, block: NDArray[Any]) -> tuple[int, int]:
        out = np.zeros(4, np.int64)
        half_range(block.reshape(-1).view(np.uint16), 0x7F80 if is_bfloat16(block.dtype) else 0x7C00, out)
        low, high, nan, inf = (int(v) for v in out)
        if low > high:
            self._add(nan, inf, None, None)
        else:
            self._add(nan, inf, _half_value(low, block.dtype), _half_value(high, block.dtype))
        return nan, inf

    def _add(self, nan: int, inf: int, low: Any, high: Any) -> None:
        self.nan += nan
        self.inf += inf
        if low is not None:
            self.minimum = low if self.minimum is None else min(self.minimum, low)
            self.maximum = high if self.maximum is None else max(self.maximum, high)

    def _compare(self, block: NDArray[Any], out: NDArray[Any], nan: int, inf: int) -> None:
        finite_out = np.isfinite(out.astype(np.float32) if is_bfloat16(out.dtype) else out)
        self.overflowed += int((~finite_out).sum()) - nan - inf
        self.underflowed += int(np.count_nonzero((out == 0) & (block != 0)))

    def state(self) -> dict[str, Any]:
        """What a resumed pack needs to go on counting."""
        return {
            k: getattr(self, k) for k in ("minimum", "maximum", "nan", "inf", "overflowed", "underflowed")
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on counting from a :meth:`state`. Raises FormatError for what is none."""
        ends = [state.get("minimum"), state.get("maximum")]
        counts = [value for key, value in state.items() if key not in ("minimum", "maximum")]
        if (
            not state.keys() <= self.state().keys()
            or not all(type(value) is int and 0 <= value < 2**63 for value in counts)
            or not (ends == [None, None] or all(isinstance(end, int | float) for end in ends))
            or any(isinstance(end, int) and abs(end) > 2**64 for end in ends)
        ):
            raise FormatError(f"these are no counts of a table's values: {shown(state)}")
        for key, value in state.items():
            setattr(self, key, value)

    def result(self) -> dict[str, Scalar]:
        """Statistics of the table. Longdouble and huge values are rounded to float64."""
        if not self.numeric and self.source.kind != "c":
            return {}
        out: dict[str, Scalar] = {"nan": self.nan, "inf": self.inf}
        if self.minimum is not None:
            for key, value in (("minimum", self.minimum), ("maximum", self.maximum)):
                out[key] = value if isinstance(value, bool | int) and abs(value) < 2**63 else float(value)
        if self.cast:
            out |= {
                "cast_from": str(self.source),
                "overflowed": self.overflowed,
                "underflowed": self.underflowed,
            }
        return out
