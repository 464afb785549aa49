"""A reader of format v1, written from ``spec.md`` alone. It uses nothing of featstore.

    python formats/v1/reader.py STORE

It checks all that the specification says a reader must check, and more; it reads whole tables into memory, and is slow
on purpose: it is here to be read, and to disagree with featstore where one of the two is wrong.
"""

import hashlib
import json
import math
import os
import re
import stat
import struct
import sys

import numpy as np

CORE = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
        "complex64", "complex128"}  # fmt: skip
FILE = {"path": str, "bytes": int, "digest": str}
ARRAY = {"path": str, "shape": list, "dtype": str}
ORDER = {"method": str, "parameters": dict, "partition_offsets": dict}
MAPS = ("row_of_node", "node_of_row", "rows_by_degree")
TABLE = ARRAY | {"rows": int, "row_shape": list, "row_bytes": int, "rows_per_chunk": int, "page_checksums": dict,
                 "order": dict, "statistics": dict}  # fmt: skip
del TABLE["shape"]
GRAPH = {"table": str, "edges": int, "offsets": dict, "sources": dict}
HUBS = {"method": str, "rows": dict, "offsets": dict, "sources": dict}
MANIFEST = {"format": str, "version": int, "reader_features": list, "writer_features": list, "uuid": str,
            "generation": str, "tables": dict, "arrays": dict, "files": list, "provenance": dict}  # fmt: skip


class Refused(ValueError):
    """The store is damaged, of another version, or not to be trusted."""


def need(condition, message):
    if not condition:
        raise Refused(message)


def crc_of_byte(n):
    for _ in range(8):
        n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
    return n


CRC = [crc_of_byte(n) for n in range(256)]


def page_checksums(data):
    """CRC-32C of each page; the last one counts as if it were filled up with zeros."""
    for start in range(0, len(data), 4096):
        crc = 0xFFFFFFFF
        for byte in data[start : start + 4096].ljust(4096, b"\0"):
            crc = crc >> 8 ^ CRC[(crc ^ byte) & 0xFF]
        yield crc ^ 0xFFFFFFFF


def unique(pairs):
    need(len({key for key, _ in pairs}) == len(pairs), "a key occurs twice in one JSON object")
    return dict(pairs)


def fields(value, required, optional=()):
    """An object with these fields of these types, and no others."""
    need(type(value) is dict and required.keys() <= value.keys() <= required.keys() | set(optional), "wrong fields")
    need(all(type(value[key]) is kind for key, kind in required.items()), f"wrong types of {list(required)}")
    return value


def name(text):
    need(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}", text) and text != "zarr.json", f"name {text}")
    return text


def descriptor(d):
    """NumPy's form of a dtype descriptor that went through JSON: fields are tuples."""
    if type(d) is str:
        return d
    return [(tuple(f[0]) if type(f[0]) is list else f[0], descriptor(f[1]), *map(tuple, f[2:])) for f in d]


def element(dtype):
    """(NumPy dtype, zarr data type, axes added in zarr) of a dtype's name. bfloat16 is read as its bits."""
    if dtype in CORE or dtype == "bfloat16":
        stored = dtype if dtype in CORE else "uint16"
        return np.dtype(stored).newbyteorder("<"), stored, []
    need(dtype.startswith("numpy:"), f"unknown dtype {dtype}")
    made = np.dtype(descriptor(json.loads(dtype[6:])))
    need(made.itemsize and not made.hasobject and made == made.newbyteorder("<"), f"dtype {dtype} is not allowed")
    return made, "uint8", [made.itemsize]


class Store:
    """An open store: ``tables`` (rows in node id order), ``rows`` (in row order), ``arrays``, ``graphs`` (offsets and sources,
    both of rows); all by name."""

    def __init__(self, path):
        self.path = path
        with open(os.path.join(path, "featstore.json"), "rb") as file:
            text = file.read(2**28 + 1)
        need(len(text) <= 2**28, "the manifest is too large")
        m = self.manifest = json.loads(text, object_pairs_hook=unique)
        need(type(m) is dict and m.get("format") == "featstore" and m.get("version") == 1, "not a store of version 1")
        features = m.get("reader_features")
        need(type(features) is list and all(f == "graphs" for f in features), "it needs features this reader lacks")
        need(re.fullmatch("g[0-9]{6,}", fields(m, MANIFEST, ("graphs",))["generation"]), "generation")
        bare = re.sub(rb'("(?:[^"\\]|\\.)*")|\s+', lambda token: token[1] or b"", text)
        h = hashlib.sha256(bare.replace(b'"uuid":"%s"' % m["uuid"].encode(), b'"uuid":""', 1)).hexdigest()
        h = f"{h[:8]}-{h[8:12]}-8{h[13:16]}-{'89ab'[int(h[16], 16) % 4]}{h[17:20]}-{h[20:32]}"
        need(h == m["uuid"], "the manifest was changed: its uuid does not fit")
        self.files = {entry["path"]: self.read(**entry) for entry in (fields(f, FILE) for f in m["files"])}
        need(len(self.files) == len(m["files"]), "a file is listed twice")
        self.arrays = {name(n): self.array(a) for n, a in m["arrays"].items()}
        self.rows, self.tables = {}, {}
        for n, t in m["tables"].items():
            rows, row_of_node = self.table(fields(t, TABLE))
            self.rows[name(n)], self.tables[n] = rows, rows if row_of_node is None else rows[row_of_node]
        need("graphs" in features or not m.get("graphs"), "graphs without the feature of that name")
        need(type(m.get("graphs", {})) is dict, "graphs")
        self.graphs = {name(n): self.graph(fields(g, GRAPH, ("hubs",))) for n, g in m.get("graphs", {}).items()}

    def inside(self, path):
        part = r"/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}"
        need(re.fullmatch(f"{self.manifest['generation']}({part})+", path), f"path {path}")
        return path

    def read(self, path, bytes, digest):
        full = os.path.join(self.path, self.inside(path))
        need(os.path.realpath(full) == os.path.join(os.path.realpath(self.path), path), f"{path} is behind a link")
        need(os.path.exists(full) and stat.S_ISREG(os.lstat(full).st_mode), f"{path} is missing or not a file")
        need(os.path.getsize(full) == bytes, f"{path} has not {bytes} bytes")
        with open(full, "rb") as file:
            data = file.read()
        sums = list(page_checksums(data))
        need(hashlib.sha256(struct.pack(f"<{len(sums)}I", *sums)).hexdigest() == digest, f"{path} is corrupt")
        return data

    def zarr(self, path, shape, chunk_shape, dtype):
        """Check an array's zarr.json; returns (NumPy dtype, axes in zarr)."""
        made, stored, extra = element(dtype)
        z = json.loads(self.files[f"{self.inside(path)}/zarr.json"])
        grid = {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in chunk_shape] + extra}}
        key = {"name": "default", "configuration": {"separator": "."}}
        said = z["zarr_format"], z["node_type"], z["shape"], z["data_type"], z["chunk_grid"], z["chunk_key_encoding"]
        need(said == (3, "array", shape + extra, stored, grid, key), f"{path}/zarr.json contradicts the manifest")
        need([codec["name"] for codec in z["codecs"]] == ["bytes"], f"{path} is encoded")
        return made, len(shape + extra)

    def chunk(self, path, size):
        need(path in self.files and len(self.files[path]) == size, f"{path} is not a listed file of {size} bytes")
        return self.files[path]

    def array(self, entry):
        shape = fields(entry, ARRAY)["shape"]
        need(len(shape) <= 31 and all(type(n) is int and 0 <= n <= 2**48 for n in shape), f"shape {shape}")
        dtype, axes = self.zarr(entry["path"], shape, shape, entry["dtype"])
        size = math.prod(shape) * dtype.itemsize
        data = self.chunk(entry["path"] + "/c" + ".0" * axes, size) if size else b""
        return np.frombuffer(data, dtype).reshape(shape)

    def table(self, t):
        """(rows in row order, row_of_node or None)"""
        rows, shape, per_chunk, row_bytes = t["rows"], t["row_shape"], t["rows_per_chunk"], t["row_bytes"]
        need(0 <= rows <= 2**40 and all(type(n) is int and n >= 1 for n in shape) and per_chunk >= 1, "table shape")
        dtype, axes = self.zarr(t["path"], [rows, *shape], [per_chunk, *shape], t["dtype"])
        need(row_bytes == math.prod(shape) * dtype.itemsize <= 2**26 and rows * row_bytes < 2**62, "row bytes")
        chunks, size = -(-rows // per_chunk), per_chunk * row_bytes
        need(chunks <= len(self.files) and (chunks <= 1 or size % 4096 == 0), "chunks")
        data = b"".join(self.chunk(f"{t['path']}/c.{k}" + ".0" * (axes - 1), size) for k in range(chunks))
        need(not any(data[rows * row_bytes :]), "the last chunk's padding is not zero")
        sums = self.array(t["page_checksums"])
        need(sums.dtype == "<u4" and sums.tolist() == list(page_checksums(data)), f"bad pages in {t['path']}")
        row_of_node = self.order(fields(t["order"], ORDER, MAPS), rows)
        return np.frombuffer(data, dtype, rows * math.prod(shape)).reshape([rows, *shape]), row_of_node

    def order(self, order, rows):
        offsets = self.array(order["partition_offsets"])
        need(offsets.dtype == "<i8" and offsets.ndim == 1 and offsets.size >= 2, "partition offsets")
        need(offsets[0] == 0 and offsets[-1] == rows and (np.diff(offsets) >= 0).all(), "partition offsets")
        maps = {m: self.array(order[m]) for m in MAPS if order.get(m) is not None}
        for m, values in maps.items():
            need(values.dtype in ("<i4", "<i8") and np.array_equal(np.sort(values), np.arange(rows)), m)
        need(("row_of_node" in maps) == ("node_of_row" in maps), "one map without the other")
        row_of_node = maps.get("row_of_node")
        need(row_of_node is None or (row_of_node[maps["node_of_row"]] == np.arange(rows)).all(), "maps are not inverse")
        return row_of_node

    def numbers(self, t, dtypes):
        """A table of plain numbers, part of a graph."""
        values, row_of_node = self.table(fields(t, TABLE))
        need(values.ndim == 1 and values.dtype in dtypes and row_of_node is None, "a graph's tables are plain numbers")
        return values

    def graph(self, g):
        """(offsets, sources)"""
        need(g["table"] in self.rows, "a graph without its table")
        rows = len(self.rows[g["table"]])
        offsets, sources = self.numbers(g["offsets"], ["<i8"]), self.numbers(g["sources"], ["<i4", "<i8"])
        need((len(offsets), len(sources)) == (rows + 1, g["edges"]), "a graph's offsets and sources")
        need(offsets[0] == 0 and offsets[-1] == g["edges"] and (np.diff(offsets) >= 0).all(), "a graph's offsets")
        need(((sources >= 0) & (sources < rows)).all(), "a graph's sources are no rows of its table")
        if g.get("hubs") is not None:
            hubs = fields(g["hubs"], HUBS)
            hub_rows, ends = self.array(hubs["rows"]), self.array(hubs["offsets"])
            copy = self.numbers(hubs["sources"], ["<i4", "<i8"])
            need(hub_rows.dtype in ("<i4", "<i8") and hub_rows.ndim == 1 and ends.dtype == "<i8", "hubs")
            found = hub_rows.tolist()
            need(len(set(found)) == len(found) and set(found) <= set(range(rows)), "hubs are not distinct rows")
            lists = [sources[offsets[r] : offsets[r + 1]] for r in found]
            need(ends.tolist() == [0, *np.cumsum([len(x) for x in lists], dtype=int).tolist()], "hub offsets")
            need(np.array_equal(np.concatenate([*lists, sources[:0]]), copy), "hubs' lists are not the lists they copy")
        return offsets, sources


if __name__ == "__main__":
    try:
        store = Store(sys.argv[1])
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{sys.argv[1]}: {error!r}")
    for what, found in (("table", store.tables), ("array", store.arrays)):
        for n, values in found.items():
            print(f"{what} {n}: {list(values.shape)} {values.dtype}")
    for n, (offsets, sources) in store.graphs.items():
        print(f"graph {n}: {len(offsets) - 1} rows, {len(sources)} edges")
