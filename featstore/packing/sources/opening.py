"""Feature sources of a pack: one door, `open_rows`, for every kind of table that featstore reads.

===========================  ====================================================================================
what is given                how it is read
===========================  ====================================================================================
``x.npy``                    sequential reads; either memory order, either byte order, every dtype without objects
any other file               headless binary, with ``dtype`` and ``shape`` (first number may be -1) and ``offset``
``x.npz``                    one member (``key``) as a stream; CSR matrices become dense block by block
``x.zarr/`` (zarr.json ...)  bands of whole chunks, through zarr; ``key`` for an array in a group
``.parquet .arrow .feather`` record batches, through pyarrow; a column of equal lists, or columns of numbers
``.pt .pth``                 a tensor or a dictionary of tensors (``key``), ``weights_only``
``.csv .csv.gz``, OGB raw/   text by blocks; the number of rows from ``num-node-list.csv.gz``
np.ndarray, torch.Tensor     views; an ``np.memmap`` is read through its file, so that its pages are not kept
SciPy sparse, zarr array     dense block by block
iterable of blocks           `IteratorRows`
===========================  ====================================================================================

The kind is found by the file itself where that is possible (an ``.npy`` magic, a zarr folder) and by its name
otherwise. Nothing is cast here: a source has the dtype that it has, in native byte order. No pickle is ever loaded.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from featstore.errors import SourceError
from featstore.packing.sources_base import RowSource, open_binary, stat_of
from featstore.packing.sources_files import NPY_MAGIC, FileRows, agreed_dtype, agreed_shape, npy_rows, raw_rows
from featstore.packing.sources_memory import ArrayRows, IteratorRows, SparseRows, TensorRows
from featstore.packing.sources_pyg import pyg_arrays, pyg_graphs, pyg_tables

__all__ = ["IteratorRows", "RowSource", "open_rows", "pyg_arrays", "pyg_graphs", "pyg_tables"]

ARROW_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")


def open_rows(
    spec: Any,
    *,
    dtype: Any = None,
    shape: Sequence[int] | None = None,
    key: str | Sequence[str] | None = None,
    offset: int = 0,
    rows: int | None = None,
    name: str | None = None,
) -> RowSource:
    """A `RowSource` for ``spec`` (see the module's table).

    Args:
        spec: a path, an array, tensor, sparse matrix or zarr array, or an iterable of row blocks.
        dtype, shape, offset: for headless files; ``dtype`` also says what text becomes. For a source that names its
            own they must agree with it: nothing is cast here.
        key: the array of an ``.npz``, zarr group or ``.pt`` dictionary, or the column or columns of a table.
        rows: number of rows that an iterable of blocks will give, if it is known.
        name: what messages call the source; a path is its own name.

    Raises SourceError for anything that cannot be read as a table of fixed-size rows.
    """
    wanted = None if shape is None else tuple(int(extent) for extent in shape)
    if isinstance(spec, (str, os.PathLike)):
        source = _open_path(Path(spec), dtype, wanted, key, offset, name)
    else:
        source = _open_object(spec, rows, name)
        if key is not None or offset:
            raise SourceError(f"{source.name}: key and offset are for files; this is a {type(spec).__name__}")
    if dtype is not None:
        agreed_dtype(source.dtype, dtype, source.name)
    if source.rows is not None:
        agreed_shape((source.rows, *source.row_shape), wanted, source.name)
    elif wanted is not None:
        agreed_shape((wanted[0] if wanted else 0, *source.row_shape), wanted, source.name)
    if rows is not None and source.rows is not None and rows != source.rows:
        raise SourceError(f"{source.name}: has {source.rows:,} rows, not {rows:,}")
    return source


def _open_path(
    path: Path,
    dtype: Any,
    shape: tuple[int, ...] | None,
    key: str | Sequence[str] | None,
    offset: int,
    name: str | None,
) -> RowSource:
    stat_of(path)
    if path.is_dir():
        return _open_folder(path, dtype, key, name)
    suffix = path.suffix.lower()
    if suffix in ARROW_SUFFIXES:
        from featstore.packing.sources_tables import arrow_rows

        return arrow_rows(path, key, name)
    single = _single_key(key, path)
    if suffix == ".npz":
        from featstore.packing.sources_npz import npz_rows

        return npz_rows(path, key=single, dtype=dtype, shape=shape, name=name)
    if suffix in (".pt", ".pth"):
        from featstore.packing.sources_foreign import TorchFileRows

        return TorchFileRows(path, single, name)
    if single is not None:
        raise SourceError(f"{path}: a {suffix or 'plain'} file holds one array, no {single!r}; leave key out")
    with open_binary(path) as file:
        has_magic = file.read(len(NPY_MAGIC)) == NPY_MAGIC
    if has_magic and offset == 0:
        return npy_rows(path, dtype=dtype, shape=shape, name=name)
    if suffix == ".csv" or path.name.lower().endswith(".csv.gz"):
        from featstore.packing.sources_text import CsvRows

        return CsvRows(path, dtype=dtype, name=name)
    if dtype is None or shape is None:
        what = (
            "no .npy magic at its start, so it is"
            if suffix == ".npy"
            else f"{suffix or 'no suffix'} is no known kind, so"
        )
        raise SourceError(
            f"{path}: {what} headless; give --dtype and --shape (dtype= and shape=, the first number may be -1)"
        )
    return raw_rows(path, dtype, shape, offset=offset, name=name)


def _open_folder(path: Path, dtype: Any, key: str | Sequence[str] | None, name: str | None) -> RowSource:
    from featstore.packing.sources_text import ogb_folder, ogb_rows

    if any((path / meta).is_file() for meta in ("zarr.json", ".zarray", ".zgroup")):
        from featstore.packing.sources_foreign import zarr_rows

        return zarr_rows(path, _single_key(key, path), name)
    raw = ogb_folder(path, "node-feat.csv.gz")
    if raw is not None:
        return ogb_rows(raw, dtype=dtype, name=name)
    raise SourceError(
        f"{path}: neither a zarr array or group (zarr.json, .zarray) nor an OGB raw folder (node-feat.csv.gz); "
        "give a file, or the folder that holds one of these"
    )


def _single_key(key: str | Sequence[str] | None, path: Path) -> str | None:
    if key is None or isinstance(key, str):
        return key
    if len(key) == 1:
        return key[0]
    raise SourceError(f"{path}: several keys are for the columns of Parquet and Arrow files; give one")


def _open_object(spec: Any, rows: int | None, name: str | None) -> RowSource:
    library = type(spec).__module__.partition(".")[0]
    if isinstance(spec, np.memmap):
        return _memmap_file(spec, name) or ArrayRows(spec, name=name or f"<memmap {spec.filename}>")
    if isinstance(spec, np.ndarray):
        return ArrayRows(spec, name=name or "<array>")
    if library == "torch" and hasattr(spec, "untyped_storage"):
        return TensorRows(spec, name=name or "<tensor>")
    if library == "scipy" and hasattr(spec, "tocsr"):
        return SparseRows(spec, name=name or "<sparse matrix>")
    if library == "zarr" and hasattr(spec, "chunks"):
        from featstore.packing.sources_foreign import ZarrRows

        return ZarrRows(spec, name=name or "<zarr array>")
    if isinstance(spec, Iterable) and not isinstance(spec, (bytes, bytearray, memoryview, dict)):
        return IteratorRows(spec, rows=rows, name=name or "<iterator>")
    raise SourceError(
        f"{name or 'source'}: cannot read rows from a {type(spec).__name__}; give a path, an array or tensor, a SciPy "
        "matrix, a zarr array, or an iterable of row blocks"
    )


def _memmap_file(array: np.memmap[Any, Any], name: str | None) -> RowSource | None:
    """The file behind a memory-mapped array, when it has the array's values in one of the two plain orders.

    None otherwise: a private copy (mode ``c``) may differ from the file, a strided view is in no plain order, and a
    result computed from a memmap is one by class alone.
    """
    mapped = getattr(array, "_mmap", None)
    plain = array.flags.c_contiguous or array.flags.f_contiguous
    if array.filename is None or mapped is None or array.mode == "c" or not plain or array.ndim == 0 or array.size == 0:
        return None
    mapping_start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    into = array.__array_interface__["data"][0] - np.frombuffer(mapped, dtype=np.uint8).__array_interface__["data"][0]
    if not 0 <= into <= len(mapped) - array.nbytes:
        return None
    path = Path(array.filename)
    if not path.is_file() or path.stat().st_size < mapping_start + into + array.nbytes:
        return None
    return FileRows(
        path,
        array.shape,
        array.dtype,
        offset=mapping_start + into,
        fortran_order=not array.flags.c_contiguous,
        kind="memmap",
        name=name,
    )
