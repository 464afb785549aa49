"""Mutants: a store or a compiled trace with some of what it says replaced, and every digest, checksum and
uuid made anew, as somebody would who wants them to be believed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featstore.base.checksum import crc_pages, digest_of_checksums
from featstore.base.dtypes import dtype_from_name
from featstore.storage.manifest import MANIFEST_NAME, uuid_of

Random = np.random.Generator

EXTREMES = [
    0, 1, 2, 3, 63, 64, 96, 129, 130, 131, 255, 260, 700, 4096, 2**24, 2**31 - 1, 2**31, 2**32, 2**39, 2**40,
    2**47, 2**48, 2**61, 2**62, 2**63 - 1, -1, -2, -130, -(2**31), -(2**62), -(2**63),
]  # fmt: skip
VALUES: list[Any] = [
    *EXTREMES, 2**63, 2**64, 2**100, 1.5, -0.0, 1e300, None, True, False, "", "x", "../x", "float32", "int32",
    "int64", "uint8", 'numpy:"<M8[s]"', 'numpy:[["a","<i4"]]', "features", "g000001", "g000001/tables",
    "0" * 64, [], {}, [0], [130], [2**47, 2**47, 0], [1, 1], [[]],
]  # fmt: skip


# Numbers.


def spoil(values: NDArray[Any], rng: Random) -> NDArray[Any]:
    """An array of integers (or anything) with something wrong in it; its length may be another."""
    if values.dtype.kind not in "iu":
        raw = np.frombuffer(values.tobytes(), np.uint8).copy()
        if len(raw):
            raw[rng.integers(len(raw), size=rng.integers(1, 4))] = rng.integers(0, 256)
        return raw.view(values.dtype)
    out, low, high = values.copy(), np.iinfo(values.dtype).min, np.iinfo(values.dtype).max
    n = len(out)

    def number() -> Any:
        if rng.random() < 0.5 and len(values):
            near = int(values[rng.integers(len(values))])
            return min(max(near + int(rng.integers(-2, 3)) * int(rng.integers(2)), low), high)
        return min(max(EXTREMES[rng.integers(len(EXTREMES))], low), high)

    for _ in range(rng.integers(1, 4)):
        how = rng.integers(10)
        if how == 8:  # of another length
            n = int(rng.integers(0, 2 * n + 3))
            out = np.resize(out, n) if len(out) else np.zeros(n, values.dtype)
        if n == 0:
            continue
        at, to = int(rng.integers(n)), int(rng.integers(n))
        if how <= 2:
            out[at] = number()
        elif how == 3:
            out[[at, to]] = out[[to, at]]
        elif how == 4:
            out[at] = out[to]
        elif how == 5:  # a fall that wraps around looks like a rise
            out[at] = min(2**62 + int(rng.integers(9)), high)
            out[min(at + 1, n - 1)] = max(-(2**62) - 2**61, low)
        elif how == 6:
            out[min(at, to) : max(at, to) + 1] = number()
        elif how == 7:
            out = out[::-1].copy()
        elif how == 9:
            out[min(at, to) : max(at, to) + 1] = rng.permutation(out[min(at, to) : max(at, to) + 1])
    return out


# Documents.


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a document, as key paths."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [at, *(p for key in keys for p in places(value[key], (*at, key)))]


def inside(document: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        document = document[key]
    return document


def change(document: Any, rng: Random, candidates: list[tuple[Any, ...]]) -> Any:
    """Something in a document replaced, left out, renamed, or exchanged with its like; ``candidates``: places
    where."""
    at = candidates[rng.integers(len(candidates))]
    if not at:
        return VALUES[rng.integers(len(VALUES))]
    outer, key, how = inside(document, at[:-1]), at[-1], rng.integers(6)
    if how <= 2:
        value = VALUES[rng.integers(len(VALUES))]
        if type(outer[key]) is int and rng.random() < 0.4:
            value = outer[key] + int(rng.integers(-2, 3))
        outer[key] = copy.deepcopy(value)
    elif how == 3:
        other = candidates[rng.integers(len(candidates))]
        if other and type(inside(document, other)) is type(outer[key]):
            outer[key] = copy.deepcopy(inside(document, other))
    else:
        old = outer.pop(key)
        if how == 4 and isinstance(outer, dict):
            outer[str(VALUES[rng.integers(len(VALUES))])] = old
    return document


# Stores.


class StoreMutant:
    """A store on disk to be changed and sealed; ``restore`` makes it what it was. Changes are kept as paths
    and their bytes before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = (path / MANIFEST_NAME).read_bytes()
        self.document: Any = json.loads(self.text)
        self.places = [
            p
            for p in places(self.document)
            if "files" not in p or p == ("files",) or p[-2] == 3 or p[-1] == 3
        ]
        self.arrays, self.tables = arrays_of(self.document), tables_of(self.document)
        self.metadata = [f["path"] for f in self.document["files"] if f["path"].endswith("zarr.json")]
        self._before: dict[Path, bytes | None] = {}

    def write(self, relative: str, data: bytes) -> None:
        """Put a file in place, sparse where it ends with many zeros, and what the manifest says of it."""
        path = self.path / relative
        if path not in self._before:
            self._before[path] = path.read_bytes() if path.exists() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entry = {
            "path": relative,
            "bytes": len(data),
            "digest": digest_of_checksums(crc_pages(np.frombuffer(data, np.uint8))),
        }
        files = self.document["files"]
        for k, one in enumerate(files):
            if one["path"] == relative:
                files[k] = entry
                return
        files.append(entry)

    def read(self, entry: dict[str, Any]) -> NDArray[Any]:
        """The elements of an array's entry, flat."""
        path = self.path / chunk_of(entry)
        data, dtype = path.read_bytes() if path.exists() else b"", dtype_from_name(entry["dtype"])
        return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)

    def set_array(self, at: tuple[Any, ...], values: NDArray[Any], *, shape: bool = True) -> None:
        """Replace the elements of the array whose entry is at ``at``, and its shape and dtype."""
        entry = inside(self.document, at)
        if shape and (len(entry["shape"]) == 1 or len(values) != int(np.prod(entry["shape"]))):
            entry["shape"] = [len(values)]
        if values.dtype.kind in "iu":
            entry["dtype"] = values.dtype.name
        if len(values):
            self.write(chunk_of(entry), values.tobytes())

    def set_rows(self, at: tuple[Any, ...], values: NDArray[Any]) -> None:
        """Replace all rows of the table (of numbers) whose entry is at ``at``, checksums included. The number
        of rows may be another."""
        entry = inside(self.document, at)
        data = values.tobytes()
        rows = len(data) // entry["row_bytes"]
        per_chunk = entry["rows_per_chunk"] if rows == entry["rows"] else max(1, rows)
        entry["rows"], entry["rows_per_chunk"] = rows, per_chunk
        sums, tail = [], ".0" * len(entry["row_shape"])
        for number in range(-(-rows // per_chunk)):
            chunk = data[
                number * per_chunk * entry["row_bytes"] : (number + 1) * per_chunk * entry["row_bytes"]
            ]
            chunk += bytes(per_chunk * entry["row_bytes"] - len(chunk))
            self.write(f"{entry['path']}/c.{number}{tail}", chunk)
            sums.append(crc_pages(np.frombuffer(chunk, np.uint8)))
        self.set_array(
            (*at, "page_checksums"), np.concatenate([np.empty(0, np.uint32), *sums]).astype(np.uint32)
        )
        if entry["order"]["partition_offsets"]["shape"] == [2]:
            self.set_array((*at, "order", "partition_offsets"), np.array([0, rows], np.int64))

    def rows(self, at: tuple[Any, ...]) -> NDArray[np.uint8]:
        """The bytes of all rows of a table."""
        entry = inside(self.document, at)
        tail, chunks = ".0" * len(entry["row_shape"]), -(-entry["rows"] // entry["rows_per_chunk"])
        data = b"".join((self.path / f"{entry['path']}/c.{k}{tail}").read_bytes() for k in range(chunks))
        return np.frombuffer(data, np.uint8)[: entry["rows"] * entry["row_bytes"]]

    def seal(self) -> None:
        """Write the manifest, with the uuid of its content."""
        document = self.document
        if isinstance(document, dict) and isinstance(document.get("uuid"), str):
            document = document | {"uuid": ""}
            document["uuid"] = uuid_of(encoded(document), "")
        (self.path / MANIFEST_NAME).write_bytes(encoded(document))

    def restore(self) -> None:
        for path, data in self._before.items():
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(data)
        self._before.clear()
        (self.path / MANIFEST_NAME).write_bytes(self.text)
        self.document = msgspec.json.decode(self.text)


def encoded(document: Any) -> bytes:
    """JSON, also with numbers that have more than 64 bits."""
    try:
        return msgspec.json.encode(document)
    except OverflowError:
        return json.dumps(document).encode()


def chunk_of(entry: dict[str, Any]) -> str:
    """Path of an array's only file."""
    return f"{entry['path']}/c" + ".0" * len(entry["shape"])


def arrays_of(document: Any) -> list[tuple[Any, ...]]:
    """Places of all entries of arrays."""
    return [
        p
        for p in places(document)
        if isinstance(inside(document, p), dict) and {"shape", "dtype", "path"} == inside(document, p).keys()
    ]


def tables_of(document: Any) -> list[tuple[Any, ...]]:
    """Places of all entries of tables of numbers or bytes without a shape: offsets, sources, hubs,
    records."""
    found = [
        p
        for p in places(document)
        if isinstance(inside(document, p), dict) and "page_checksums" in inside(document, p)
    ]
    return [p for p in found if not inside(document, p)["row_shape"]]


def mutate_store(store: StoreMutant, rng: Random) -> tuple[list[str], str]:
    """Change something of a store and seal it; says which kinds of files (of :data:`bench.FILES`) were
    changed, and what."""
    what: list[str] = []
    kinds: list[str] = []
    arrays, tables, candidates = store.arrays, store.tables, store.places
    for turn in range(1 if rng.random() < 0.7 else 2):
        how, document = rng.integers(17), store.document
        if turn and "manifest" in kinds:  # what it says of files may be anything
            how, candidates = 16, places(document)
        if how < 6:
            at = arrays[rng.integers(len(arrays))]
            if at[-1] == "page_checksums" and rng.random() < 0.8:
                continue
            values = store.read(inside(document, at))
            if values.dtype.kind in "iu" and rng.random() < 0.2:
                values = values.astype(np.int32 if values.dtype == np.int64 else np.int64)
            store.set_array(at, spoil(values, rng), shape=rng.random() < 0.9)
            kinds.append(kind_of(at))
            what.append("array " + "/".join(map(str, at)))
        elif how < 11 and tables:
            at = tables[rng.integers(len(tables))]
            entry = inside(document, at)
            if entry["dtype"] == "uint8":
                store.set_rows(at, spoil_records(store.rows(at), rng))
            else:
                store.set_rows(at, spoil(store.rows(at).view(dtype_from_name(entry["dtype"])), rng))
                if at[-1] == "sources" and at[0] == "graphs" and rng.random() < 0.8:
                    inside(document, at[:-1])["edges"] = entry["rows"]
            kinds.append(kind_of(at))
            what.append("table " + "/".join(map(str, at)))
        elif how == 11:
            path = store.metadata[rng.integers(len(store.metadata))]
            try:
                found = json.loads((store.path / path).read_bytes())
            except ValueError:  # it was spoiled in the turn before
                continue
            store.write(path, spoil_text(encoded(change(found, rng, places(found))), rng))
            kinds.append("metadata")
            what.append(path)
        else:
            document = store.document = change(document, rng, candidates)
            kinds.append("manifest")
            what.append("manifest")
            if not isinstance(document, dict) or not isinstance(document.get("files"), list):
                break
    store.seal()
    return kinds or ["checksums"], ", ".join(what)


def kind_of(at: tuple[Any, ...]) -> str:
    """The kind of file in which the array or table of an entry is."""
    if at[-1] == "page_checksums":
        return "checksums"
    if at[0] == "graphs":
        return "graph"
    return "map" if "order" in at else "array" if at[0] == "arrays" else "records"


def spoil_text(text: bytes, rng: Random) -> bytes:
    """Now and then no longer what it was the text of: cut short, or with another byte."""
    if len(text) == 0 or rng.random() < 0.85:
        return text
    at = int(rng.integers(len(text)))
    return text[:at] if rng.random() < 0.4 else text[:at] + rng.bytes(1) + text[at + 1 :]


def spoil_records(data: NDArray[np.uint8], rng: Random) -> NDArray[np.uint8]:
    """Records with some of their numbers replaced: most of them are int32 and int64."""
    out = data.copy()
    for _ in range(rng.integers(1, 4)):
        width = int(rng.choice([1, 4, 8, 8]))
        words = out[: len(out) // width * width].view(f"<i{width}" if width > 1 else np.uint8)
        if len(words) == 0:
            break
        # Heads of records are short, and stand where there is little but them.
        small = np.flatnonzero(words) if rng.random() < 0.7 else np.arange(len(words))
        at = int(small[rng.integers(len(small))]) if len(small) else 0
        words[at] = np.resize(spoil(words[at : at + 1], rng), 1)[0] if width > 1 else rng.integers(0, 256)
    return out
