"""Feature sources of a pack: one door, `open_rows`, for every kind of table that featstore reads.

What is given, and how it is read:

- ``x.npy``: sequential reads; either memory order, either byte order, every dtype without objects
- any other file: headless binary, with ``dtype`` and ``shape`` (first number may be -1) and ``offset``
- ``x.npz``: one member (``key``) as a stream; CSR matrices become dense block by block
- ``x.zarr/`` (zarr.json ...): bands of whole chunks, through zarr; ``key`` for an array in a group
- ``.parquet .arrow .feather``: record batches, through pyarrow; a column of equal lists, or columns of
  numbers
- ``.pt .pth``: a tensor or a dictionary of tensors (``key``), ``weights_only``
- ``.safetensors``, ``.h5 .hdf5``: a tensor, as headless binary; a data set through h5py (``key``)
- a folder, a pattern of names, or a list of files of one kind: shards, one after the other
- ``.csv .csv.gz``, OGB raw/: text by blocks; the number of rows from ``num-node-list.csv.gz``
- np.ndarray, torch.Tensor: views; an ``np.memmap`` is read through its file, so that its pages are not kept
- frames of polars, pandas, pyarrow: columns, as those of Parquet
- SciPy sparse: dense block by block
- zarr, h5py, other arrays: by slices ``[a:b]`` where it has a ``shape``; else whole: ``__array__``, DLPack,
  buffers
- iterable of blocks: `IteratorRows`; with ``shape``, of single rows as well

Where rows are records (a structured dtype), their fields are columns: `featstore.packing.sources.fields`.

The kind is found by the file itself where that is possible (an ``.npy`` magic, a zarr folder) and by its name
otherwise. Nothing is cast here: a source has the dtype that it has, in native byte order. No pickle is ever
loaded.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from featstore.arguments import shown
from featstore.base.system import is_directory, is_regular
from featstore.errors import SourceError
from featstore.packing.graphs.opening import pyg_graphs
from featstore.packing.sources.arrays import FRAME_PROTOCOLS, SlicedRows, array_of, is_sliced
from featstore.packing.sources.base import FeatureSource, open_binary, stat_of
from featstore.packing.sources.containers import hdf5_rows, safetensors_rows
from featstore.packing.sources.fields import with_fields
from featstore.packing.sources.files import (
    NPY_MAGIC,
    FileRows,
    agreed_dtype,
    agreed_shape,
    npy_rows,
    raw_rows,
)
from featstore.packing.sources.frames import FrameRows, is_frame
from featstore.packing.sources.memory import ArrayRows, IteratorRows, SparseRows, TensorRows
from featstore.packing.sources.pyg import pyg_arrays, pyg_tables
from featstore.packing.sources.shards import ShardedRows, shard_paths
from featstore.packing.sources.tables import ARROW_SUFFIXES

__all__ = [
    "FeatureSource",
    "IteratorRows",
    "is_headless",
    "is_text",
    "open_rows",
    "pyg_arrays",
    "pyg_graphs",
    "pyg_tables",
]

#: Of files that are no raw binary, whatever dtype and shape are given.
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
# Files that name their own dtype and shape, by suffix; of the others, only .npy files do, which have a magic
# number.
NAMED_SUFFIXES = (".npz", ".pt", ".pth", ".safetensors", ".h5", ".hdf5", ".csv", ".csv.gz", *ARROW_SUFFIXES)


def _first(spec: Any) -> Any:
    """Of shards the first, of which all are alike; anything else as it is."""
    shards = shard_paths(spec)
    return shards[0] if shards else spec


def is_headless(spec: Any, offset: int = 0) -> bool:
    """Whether something is a file of raw binary: its dtype and shape have to be told."""
    spec = _first(spec)
    if not isinstance(spec, str | os.PathLike):
        return False
    path = Path(spec)
    if not is_regular(path) or path.name.lower().endswith(NAMED_SUFFIXES):
        return False
    with open_binary(path) as file:
        return offset > 0 or file.read(len(NPY_MAGIC)) != NPY_MAGIC


def is_text(spec: Any) -> bool:
    """Whether something is a file (or OGB's folder) of numbers in text, which have no dtype of their own."""
    spec = _first(spec)
    if not isinstance(spec, str | os.PathLike):
        return False
    from featstore.packing.sources.text import ogb_folder

    path = Path(spec)
    return path.name.lower().endswith((".csv", ".csv.gz")) or ogb_folder(path, "node-feat.csv.gz") is not None


def open_rows(
    spec: Any,
    *,
    dtype: Any = None,
    shape: Sequence[int] | None = None,
    key: str | Sequence[str] | None = None,
    columns: str | int | Sequence[str | int] | None = None,
    id: str | int | None = None,
    offset: int = 0,
    rows: int | None = None,
    name: str | None = None,
) -> FeatureSource:
    """A `FeatureSource` for ``spec`` (see the module's table).

    Args:
        spec: a path, an array, tensor, sparse matrix or zarr array, or an iterable of row blocks.
        dtype, shape, offset: for headless files; ``dtype`` also says what text becomes. For a source that
            names its own they must agree with it: nothing is cast here. ``shape`` is that of the whole table,
            ``(rows, ...)``, the first number -1 for as many as there are; for an iterable it tells rows
            (items of ``shape[1:]``) from blocks.
        key: the array of an ``.npz``, zarr group or ``.pt`` dictionary. For a table with named columns, as
            ``columns``.
        columns: of Parquet, Arrow and text, the columns that are features, by name or position; ``"*"`` for
            all, whatever they look like. Without it all are, and a table with a column that cannot be one or
            looks like ids is refused. Of structured arrays, fields, see `featstore.packing.sources.fields`.
        id: of the same, the column that says whose row it is, by name or position: 0 to n-1, each once. It is
            no feature, and the caller places the rows by `FeatureSource.ids`. Without it, row i is node i.
        rows: number of rows that an iterable of blocks will give, if it is known.
        name: what messages call the source; a path is its own name.

    Raises SourceError for anything that cannot be read as a table of fixed-size rows.
    """
    label = name or (os.fspath(spec) if isinstance(spec, str | os.PathLike) else f"<{type(spec).__name__}>")
    wanted = _shape(shape, label)
    shards = shard_paths(spec)
    if isinstance(offset, bool) or not isinstance(offset, int | np.integer) or offset < 0:
        raise SourceError(
            f"{label}: offset is a number of bytes from the start of a file, not {shown(offset)}"
        )
    if shards is not None:
        of_each: dict[str, Any] = {"key": key, "columns": columns, "id": id, "offset": offset, "dtype": dtype}
        of_each["shape"] = wanted and (-1, *wanted[1:])
        label = label if isinstance(spec, str | os.PathLike) else f"<{len(shards):,} shards>"
        source: FeatureSource = ShardedRows([open_rows(path, **of_each) for path in shards], label)
    elif isinstance(spec, (str, os.PathLike)):
        source = _open_path(Path(spec), dtype, wanted, key, columns, id, offset, name)
    else:
        if rows is None and wanted and wanted[0] >= 0:
            rows = wanted[0]
        source = (
            FrameRows(spec, columns, id, label) if is_frame(spec) else _open_object(spec, rows, wanted, name)
        )
        for what, value in (("key", key), ("offset", offset or None)):
            if value is not None:
                raise SourceError(
                    f"{source.name}: {what}= is for files; this is a {type(spec).__name__}: leave it out"
                )
    if dtype is not None:
        agreed_dtype(source.dtype, dtype, source.name)
    if source.rows is None:  # text, a stream: the pass holds its rows against what was told
        source.rows = rows if rows is not None or not wanted or wanted[0] < 0 else wanted[0]
        agreed_shape((-1, *source.row_shape), None if wanted is None else (-1, *wanted[1:]), source.name)
    else:
        agreed_shape((source.rows, *source.row_shape), wanted, source.name)
    if rows is not None and rows != source.rows:
        raise SourceError(f"{source.name}: has {source.rows:,} rows, not {rows:,}")
    own = shards is not None or is_frame(spec) or _has_columns(spec)
    return source if own else with_fields(source, columns, id)


def _has_columns(spec: Any) -> bool:
    """Whether something is a file of columns that have names: Parquet, Arrow, text."""
    if not isinstance(spec, str | os.PathLike):
        return False
    name = Path(spec).name.lower()
    return name.endswith((".csv", ".csv.gz", *ARROW_SUFFIXES)) and not is_directory(Path(spec))


def _shape(shape: Sequence[int] | None, name: str) -> tuple[int, ...] | None:
    if shape is None:
        return None
    given = (
        list(shape)
        if isinstance(shape, Sequence | np.ndarray) and not isinstance(shape, str | bytes)
        else [None]
    )
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) for n in given):
        raise SourceError(f"{name}: shape is that of the whole table, such as (-1, 128), not {shown(shape)}")
    return tuple(int(n) for n in given)  # type: ignore[arg-type]


def _open_path(
    path: Path,
    dtype: Any,
    shape: tuple[int, ...] | None,
    key: str | Sequence[str] | None,
    columns: str | int | Sequence[str | int] | None,
    id: str | int | None,
    offset: int,
    name: str | None,
) -> FeatureSource:
    stat_of(path)
    suffix = path.suffix.lower()
    if _has_columns(path):
        if key is not None and columns is not None:
            raise SourceError(f"{path}: key= and columns= both name columns; give columns= alone")
        if offset:
            raise SourceError(f"{path}: offset= is for headless files; leave it out")
        return _open_columns(path, dtype, key if columns is None else columns, id, name)
    if offset and (is_directory(path) or suffix in NAMED_SUFFIXES):
        raise SourceError(f"{path}: offset= is for headless files; leave it out, or give it by table")
    if is_directory(path):
        return _open_folder(path, dtype, key, name)
    single = _single_key(key, path)
    if suffix == ".npz":
        from featstore.packing.sources.npz import npz_rows

        return npz_rows(path, key=single, dtype=dtype, shape=shape, name=name)
    if suffix == ".safetensors":
        return safetensors_rows(path, single, name)
    if suffix in (".h5", ".hdf5"):
        return hdf5_rows(path, single, name)
    if suffix in (".pt", ".pth"):
        from featstore.packing.sources.foreign import TorchFileRows

        return TorchFileRows(path, single, name)
    if single is not None:
        raise SourceError(f"{path}: a {suffix or 'plain'} file holds one array, no {single!r}; leave key out")
    if suffix in COMPRESSED_SUFFIXES:
        raise SourceError(
            f"{path}: a {suffix} file is compressed, and of these only .csv.gz is read: unpack it first, or "
            "rename it where it is raw binary"
        )
    with open_binary(path) as file:
        has_magic = file.read(len(NPY_MAGIC)) == NPY_MAGIC
    if has_magic and offset == 0:
        return npy_rows(path, dtype=dtype, shape=shape, name=name)
    if dtype is None or shape is None:
        what = (
            "it does not begin as an .npy file does, so that it can only be raw binary"
            if suffix == ".npy"
            else f"a {suffix or 'plain'} file is read as raw binary (numbers in text are, as .csv)"
        )
        raise SourceError(
            f"{path}: {what}, which does not say what it holds; give --dtype and --shape (dtype= and shape=, "
            "the first number may be -1)"
        )
    return raw_rows(path, dtype, shape, offset=offset, name=name)


def _open_columns(
    path: Path,
    dtype: Any,
    columns: str | int | Sequence[str | int] | None,
    id: str | int | None,
    name: str | None,
) -> FeatureSource:
    if path.suffix.lower() in ARROW_SUFFIXES:
        from featstore.packing.sources.tables import arrow_rows

        return arrow_rows(path, columns, name, id=id)
    from featstore.packing.sources.text import CsvRows

    return CsvRows(path, dtype=dtype, name=name, columns=columns, id=id)


def _open_folder(path: Path, dtype: Any, key: str | Sequence[str] | None, name: str | None) -> FeatureSource:
    from featstore.packing.sources.text import ogb_folder, ogb_rows

    if any(is_regular(path / meta) for meta in ("zarr.json", ".zarray", ".zgroup")):
        from featstore.packing.sources.foreign import zarr_rows

        return zarr_rows(path, _single_key(key, path), name)
    raw = ogb_folder(path, "node-feat.csv.gz")
    if raw is not None:
        if key is not None:
            raise SourceError(
                f"{path}: the rows of an OGB folder have no key; leave key out, or give it by table"
            )
        return ogb_rows(raw, dtype=dtype, name=name)
    raise SourceError(
        f"{path}: neither a zarr array or group (zarr.json, .zarray) nor an OGB raw folder "
        "(node-feat.csv.gz) nor one of shards; give a file, or the folder that holds one of these"
    )


def _single_key(key: str | Sequence[str] | None, path: Path) -> str | None:
    if key is None or isinstance(key, str):
        return key
    if len(key) == 1:
        return key[0]
    raise SourceError(f"{path}: several keys are for the columns of Parquet, Arrow and .csv files; give one")


def _open_object(
    spec: Any, rows: int | None, shape: tuple[int, ...] | None, name: str | None
) -> FeatureSource:
    library = type(spec).__module__.partition(".")[0]
    if isinstance(spec, FeatureSource):
        return spec
    if isinstance(spec, np.memmap):
        return _memmap_file(spec, name) or ArrayRows(spec, name=name or f"<memmap {spec.filename}>")
    if library == "torch" and hasattr(spec, "untyped_storage"):
        return TensorRows(spec, name=name or "<tensor>")
    if library == "scipy" and hasattr(spec, "tocsr"):
        return SparseRows(spec, name=name or "<sparse matrix>")
    if library == "zarr" and hasattr(spec, "chunks"):
        from featstore.packing.sources.foreign import ZarrRows

        return ZarrRows(spec, name=name or "<zarr array>")
    label = name or f"<{type(spec).__name__}>"
    frame = any(hasattr(spec, protocol) for protocol in FRAME_PROTOCOLS)
    whole = frame or hasattr(spec, "__array_interface__") or isinstance(spec, memoryview)
    if is_sliced(spec) and not whole:
        return SlicedRows(spec, name=label)
    array = array_of(spec, name or ("<array>" if isinstance(spec, np.ndarray) else label))
    if array is not None:
        return ArrayRows(array, name=name or "<array>", held=not isinstance(spec, np.ndarray))
    if isinstance(spec, Iterable) and not isinstance(spec, (bytes, bytearray, Mapping, Set)):
        if shape == ():
            raise SourceError(f"{label}: shape () is no table; give (-1,) for rows of one value each")
        return IteratorRows(
            spec, rows=rows, row_shape=None if shape is None else shape[1:], name=name or "<iterator>"
        )
    raise SourceError(
        f"{name or 'source'}: cannot read rows from a {type(spec).__name__}; give a path, an array or "
        "tensor, a SciPy matrix, a zarr array, or an iterable of row blocks"
    )


def _memmap_file(array: np.memmap[Any, Any], name: str | None) -> FeatureSource | None:
    """The file behind a memory-mapped array, when it has the array's values in one of the two plain orders.

    None otherwise: a private copy (mode ``c``) may differ from the file, a strided view is in no plain order,
    and a result computed from a memmap is one by class alone.
    """
    mapped = getattr(array, "_mmap", None)
    plain = array.flags.c_contiguous or array.flags.f_contiguous
    if (
        array.filename is None
        or mapped is None
        or array.mode == "c"
        or not plain
        or array.ndim == 0
        or array.size == 0
    ):
        return None
    mapping_start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    into = (
        array.__array_interface__["data"][0]
        - np.frombuffer(mapped, dtype=np.uint8).__array_interface__["data"][0]
    )
    if not 0 <= into <= len(mapped) - array.nbytes:
        return None
    path = Path(array.filename)
    if not is_regular(path) or stat_of(path).st_size < mapping_start + into + array.nbytes:
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
