"""A lane: one planned batch of reads on its way through an engine.

A lane is a row of int64 fields that kernels read and write through its address: how many extents there are,
which is next, how many are done, where the sorted row keys, the destination and the page checksums lie.
Kernels take lanes of any table, dtype and row size, several at a time, so the queue of a device stays full
from one request to the next. What of an extent is wanted is said by row keys, or, where runs of rows are read
whole, by one span of bytes. The Python object keeps the arrays behind the addresses alive and carries the
completion callback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.native import address_of
from featstore.errors import CancelledError, CorruptionError, DeviceError
from featstore.units import PAGE_BYTES

if TYPE_CHECKING:
    from featstore.engine.files import Checked, TableFiles

# Fields of a lane. Kernels use the numbers; keep the two in step.
EXTENTS = 0  # number of extents
NEXT = 1  # next extent that nobody has taken (atomically; beyond EXTENTS when all are)
DONE = 2  # extents finished (atomically)
CANCEL = 3  # not 0: start no more extents
ERROR = 4  # 0, a negative errno, or one of the codes below
ERROR_PAGE = 5  # page (of the table) where it happened
ERROR_EXPECTED = 6
ERROR_ACTUAL = 7
ERROR_CLAIM = 8  # taken atomically by the first who reports an error
EXTENT_PAGE = 9  # address of int64 [extents]: first page, in the table's address space
EXTENT_PAGES = 10  # address of int32 [extents]: number of pages
EXTENT_FIRST = 11  # address of int32 [extents + 1]: first key of each extent
KEYS = 12  # address of uint64 [keys]: row << position_bits | position, ascending
POSITION_BITS = 13
OUT = 14  # address of the destination: row_bytes for each position
ROW_BYTES = 15
FILE_HANDLE = 16  # address of int64 [files]: descriptor, or address of the mapping
FILE_BYTES = 17  # size of every chunk file in bytes
PAGES_PER_FILE = 18
CHECKSUMS = 19  # address of uint32 [pages], or 0: do not verify
SPANS = 20  # address of int64 [extents, 3]: first byte, end (of the table), destination byte; or 0: by keys
CHECKED = 21  # address of a bit for each page that need not be checked again, or 0: see featstore.engine.pool
ALL_FAULTS = 22  # address of an int64, or 0: as FAULTS, of all lanes of the table (atomically)
FAULTS = 23  # pages of a mapping that were not in this process's memory when they were looked at (atomically)
TRUSTED_AT = 24  # what CHECKED says is so as long as ALL_FAULTS is this
FIELDS = 25

ERROR_CORRUPT = 1
ERROR_TRUNCATED = 2


class Lane:
    """Reads of one table, planned, with a destination; see the module's text."""

    def __init__(
        self,
        files: TableFiles,
        extent_page: NDArray[np.int64],
        extent_pages: NDArray[np.int32],
        extent_first: NDArray[np.int32],
        keys: NDArray[np.uint64],
        position_bits: int,
        out: NDArray[np.uint8],
        on_done: Callable[[Lane], None],
        spans: NDArray[np.int64] | None = None,
        row_bytes: int | None = None,
    ) -> None:
        self.files = files
        self.on_done = on_done
        self.failure: Exception | None = None  # an error found outside the kernels
        self.checked: Checked | None = None  # of a mapping: which pages need not be
        self.extents = len(extent_page)
        self._alive: tuple[Any, ...] = (extent_page, extent_pages, extent_first, keys, out, spans)
        self.extent_pages_max = int(extent_pages.max(initial=0))
        self.pages = int(extent_pages.sum())
        self.fields = np.zeros(FIELDS, np.int64)
        f = self.fields
        f[EXTENTS] = self.extents
        f[EXTENT_PAGE], f[EXTENT_PAGES] = address_of(extent_page), address_of(extent_pages)
        f[EXTENT_FIRST], f[KEYS] = address_of(extent_first), address_of(keys)
        f[POSITION_BITS], f[OUT] = position_bits, address_of(out)
        f[ROW_BYTES] = row_bytes or files.layout.row_bytes  # others where pages are read as rows
        f[FILE_HANDLE], f[FILE_BYTES] = address_of(files.handles), files.layout.chunk_bytes
        f[PAGES_PER_FILE] = files.layout.pages_per_chunk
        f[SPANS] = 0 if spans is None else address_of(spans)
        f[CHECKSUMS] = 0 if files.checksums is None else address_of(files.checksums)

    @property
    def address(self) -> int:
        return address_of(self.fields)

    def cancel(self) -> None:
        """Start no further reads; those under way finish and are dropped."""
        self.fields[CANCEL] = 1

    def error(self) -> Exception | None:
        """What went wrong, as the exception to raise; None if all rows have arrived."""
        if self.failure is not None:
            return self.failure
        f = self.fields
        code = int(f[ERROR])
        if code == 0:
            if f[DONE] == f[EXTENTS]:
                return None
            if f[CANCEL]:
                return CancelledError("the request was cancelled; submit it again where its rows are wanted")
            return RuntimeError(f"a read ended with {f[DONE]:,} of {f[EXTENTS]:,} extents: please report it")
        file, page = divmod(int(f[ERROR_PAGE]), self.files.layout.pages_per_chunk)
        path, offset = self.files.paths[file], page * PAGE_BYTES
        if code == ERROR_CORRUPT:
            return CorruptionError(
                path,
                offset,
                f"checksum {int(f[ERROR_EXPECTED]):08x} of the 4 KiB page",
                f"{int(f[ERROR_ACTUAL]):08x}",
            )
        if code == ERROR_TRUNCATED:
            return CorruptionError(
                path,
                offset,
                f"{int(f[ERROR_EXPECTED])} bytes",
                f"{int(f[ERROR_ACTUAL])} bytes before the end of the file",
            )
        return DeviceError(-code, path, offset)
