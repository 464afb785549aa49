"""Row sources in the files of other libraries: zarr arrays and torch checkpoints."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.system import is_regular
from featstore.errors import SourceError
from featstore.packing.sources.arrays import SlicedRows
from featstore.packing.sources.base import dtype_text, file_fingerprint, import_extra, stat_of, text_of
from featstore.packing.sources.columns import check_beside
from featstore.packing.sources.memory import TensorRows

__all__ = ["TorchFileRows", "ZarrRows", "load_tensor", "zarr_rows"]

# zarr-python decodes this many chunks at a time (its `async.concurrency`).
ZARR_CONCURRENCY = 10
# Names in the folder of an array: what tells of it, and chunks.
_OF_AN_ARRAY = re.compile(r"zarr\.json|\.z[a-z]+|c(\.[0-9]+)*|[0-9.]+")


class ZarrRows(SlicedRows):
    """Rows of a zarr array (v2 or v3), read in bands of whole chunks so that each chunk is decoded once.

    zarr itself reads a chunk that is missing as its fill value, without a word; that cannot be told from data
    here.
    """

    def __init__(self, array: Any, *, name: str = "<zarr array>", path: Path | None = None) -> None:
        decoded_bytes = 0
        if array.ndim:
            values = int(np.prod(array.shape[1:], dtype=np.int64)) * max(1, int(array.chunks[0]))
            values += 2 * ZARR_CONCURRENCY * int(np.prod(array.chunks, dtype=np.int64))
            decoded_bytes = values * np.dtype(array.dtype).itemsize
        super().__init__(array, name=name, held_bytes=decoded_bytes)
        root = getattr(array.store, "root", None)  # of a folder on this machine
        self._path = root if path is None and isinstance(root, Path) else path

    @property
    def is_folder(self) -> bool:
        """Whether it lies in a folder, so that what changes there can be told."""
        return self._path is not None

    def fingerprint(self) -> dict[str, str | int]:
        """Path, and a CRC over name, size and time of change of each file of the array; of an archive its own
        size and time; in memory a CRC of some rows; elsewhere its name, and what shape it has."""
        shape = ",".join(map(str, self._array.shape))
        more: dict[str, str | int] = {
            "shape": shape,
            "dtype": dtype_text(self.dtype),
            "key": str(self._array.path),
        }
        if self._path is None:
            if type(self._array.store).__name__ == "MemoryStore":  # whose name tells processes apart
                return super().fingerprint() | {"kind": "zarr", **more}
            file = getattr(self._array.store, "path", None)
            if isinstance(file, Path) and is_regular(file):  # an archive
                return file_fingerprint("zarr", file, **more)
            return {"kind": "zarr", "store": str(self._array.store), **more}
        crc, size_bytes, own = 0, 0, self._path / self._array.path
        text_of(own)
        for folder, folders, files in os.walk(own):
            if Path(folder) == own:  # beside which other things may lie
                folders[:], files[:] = (filter(_OF_AN_ARRAY.fullmatch, some) for some in (folders, files))
            folders.sort()
            for file in sorted(files):
                status = stat_of(Path(folder) / file)
                name = os.fsencode(f"{folder}/{file}")
                crc = zlib.crc32(name + f" {status.st_size} {status.st_mtime_ns}".encode(), crc)
                size_bytes += status.st_size
        return {
            "kind": "zarr",
            "path": str(self._path.absolute()),
            "size_bytes": size_bytes,
            "files_crc32": crc,
            **more,
        }


def zarr_rows(path: Path, key: str | None = None, name: str | None = None) -> ZarrRows:
    """Rows of an array in a zarr directory; ``key`` picks one in a group. Raises SourceError that lists the
    arrays."""
    label = name or (f"{path}[{key}]" if key else str(path))
    zarr = import_extra("zarr", "zarr", label)
    try:
        node = zarr.open(str(path), mode="r")
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise SourceError(f"{label}: cannot be opened by zarr ({error}); check its metadata") from error
    if isinstance(node, zarr.Array):
        if key is not None:
            raise SourceError(f"{label}: is an array itself, not a group; leave key out")
        return ZarrRows(node, name=label, path=path)
    arrays = {
        member: found for member, found in node.members(max_depth=None) if isinstance(found, zarr.Array)
    }
    if key is None:
        tables = [member for member, found in arrays.items() if found.ndim >= 2] or list(arrays)
        if len(tables) != 1:
            raise SourceError(
                f"{label}: {len(tables)} arrays could be the table; give key=, one of: "
                f"{', '.join(sorted(arrays))}"
            )
        key = tables[0]
        check_beside({member: tuple(found.shape) for member, found in arrays.items()}, key, label)
    if key not in arrays:
        raise SourceError(f"{label}: no array {key!r} in this group; it holds: {', '.join(sorted(arrays))}")
    return ZarrRows(arrays[key], name=f"{path}[{key}]", path=path)


class TorchFileRows(TensorRows):
    """Rows of a tensor in a ``.pt`` file, mapped by torch; mapped pages are given back after each block."""

    def __init__(self, path: Path, key: str | None = None, name: str | None = None) -> None:
        tensor, key = load_tensor(path, key)
        label = name or (f"{path}[{key}]" if key else str(path))
        _refuse_other_order(path)
        super().__init__(tensor, name=label)
        self._identity = file_fingerprint("torch", path, key=key or "", dtype=dtype_text(self.dtype))

    def _blocks(self, start: int, block_rows: int) -> Iterator[NDArray[Any]]:
        # A private mapping of ours that is never written: its pages can be dropped, they come back from the
        # file.
        storage = self._tensor.untyped_storage()
        page = mmap.PAGESIZE
        low = -(-storage.data_ptr() // page) * page
        size = (storage.data_ptr() + storage.nbytes()) // page * page - low
        libc = ctypes.CDLL(None, use_errno=True)
        for block in super()._blocks(start, block_rows):
            yield block
            if size > 0:
                libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED))


def _refuse_other_order(path: Path) -> None:
    """torch turns the bytes of such a file in its mapping, where pages that are given back come unturned."""
    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/byteorder")]
    if orders and orders[0] != sys.byteorder:
        raise SourceError(
            f"{path}: written in {orders[0]}-endian order, and this machine's is {sys.byteorder}: load and "
            "save it here first"
        )


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Of a tensor, a list of values, and one value; None for anything else."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return (len(value),)
    return () if value is None or isinstance(value, bool | int | float | str) else None


def load_tensor(path: Path, key: str | None) -> tuple[Any, str | None]:
    """A tensor of a ``.pt`` file (``weights_only``: no pickled code runs), mapped, and its key if it is in a
    dict."""
    torch = import_extra("torch", "torch", str(path))
    import pickle

    stat_of(path)
    try:
        loaded = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise SourceError(
            f"{path}: holds more than plain tensors, or is no torch.save file of today's format "
            f"({reason}); save the tensor alone with torch.save(tensor, path), or load the file "
            "yourself and give the tensor"
        ) from error
    if isinstance(loaded, torch.Tensor):
        if key is not None:
            raise SourceError(f"{path}: holds one tensor, no dictionary with a key {key!r}; leave key out")
        return loaded, None
    if not isinstance(loaded, dict):
        raise SourceError(
            f"{path}: holds a {type(loaded).__name__}; save a tensor or a dictionary of tensors"
        )
    tensors = {str(k): v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
    if key is None:
        tables = [k for k, v in tensors.items() if v.ndim >= 2] or list(tensors)
        if len(tables) != 1:
            raise SourceError(
                f"{path}: {len(tables)} tensors could be the table; give key=, one of: {', '.join(tensors)}"
            )
        key = tables[0]
        shapes = {str(k): _shape_of(v) for k, v in loaded.items()}
        others = [k for k, shape in shapes.items() if shape is None]
        if tensors[key].ndim < 2 and others:
            raise SourceError(
                f"{path}: {key!r} is the only tensor, of one axis, and {', '.join(map(repr, others))} beside "
                f"it may hold the table: say key={key!r}, or save the table alone with "
                "torch.save(tensor, path)"
            )
        check_beside(shapes, key, str(path))
    if key not in tensors:
        raise SourceError(f"{path}: no tensor {key!r}; it holds: {', '.join(tensors)}")
    return tensors[key], key
