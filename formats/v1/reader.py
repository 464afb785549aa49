"""A reader of format v1, written from ``spec.md`` alone. It uses nothing of featstore.

    python formats/v1/reader.py STORE

It checks what the specification says a reader must check, but for some limits on sizes (section 3.3), and
more; it reads whole tables into memory, and is slow on purpose: it is here to be read, and to disagree with
featstore where one of the two is wrong.
"""

import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
from bisect import bisect_left
from itertools import pairwise

import numpy as np

CORE = {
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}
FILE = {"path": str, "bytes": int, "digest": str}
ARRAY = {"path": str, "shape": list, "dtype": str}
ORDER = {"method": str, "parameters": dict, "partition_offsets": dict}
MAPS = ("row_of_node", "node_of_row", "rows_by_degree")
TABLE = ARRAY | {
    "rows": int,
    "row_shape": list,
    "row_bytes": int,
    "rows_per_chunk": int,
    "page_checksums": dict,
    "order": dict,
    "statistics": dict,
}
del TABLE["shape"]
GRAPH = {"table": str, "edges": int, "offsets": dict, "sources": dict}
GRAPH_MAY = ("hubs", "edge_ids", "relation", "source_table", "weights", "times")
EDGE_PARTS = {"edge_ids": ["<i4", "<i8"], "weights": ["<f4", "<f8"], "times": ["<i8"]}
HUBS = {"method": str, "rows": dict, "offsets": dict, "sources": dict}
COMPILED = {
    "base_uuid": str,
    "trace_uuid": str,
    "residency": str,
    "batches": int,
    "memory_bytes": int,
    "records": str,
    "offsets": str,
    "tables": dict,
    "forecast": dict,
}
FAMILY = {"hosts": int, "base_uuid": str, "first_rows": dict, "remote_edges": dict}
FAMILY_MAY = ("uuid", "host", "split_graphs")
SPLIT_GRAPH = {"table": str, "edges": int}
LISTS = {"offsets": dict, "sources": dict, "run_rows": dict, "run_edges": dict}
PARTS = ("packed", "shared", "resident", "device")
COMPILED_TABLE = dict.fromkeys(PARTS, str) | {
    "turn": str,
    "base_rows": int,
    "batch_rows_max": int,
    "placement": dict,
}
RECORD = (
    "hit_place",
    "hit_slot",
    "packed_place",
    "shared_place",
    "shared_row",
    "base_place",
    "base_row",
    "copy_place",
    "copy_from",
    "admit_place",
    "admit_slot",
    "device_place",
    "device_slot",
    "host_place",
)
MANIFEST = {"format": str, "version": int, "reader_features": list, "writer_features": list, "uuid": str,
            "generation": str, "tables": dict, "arrays": dict, "files": list, "provenance": dict}  # fmt: skip


KEYS = {"kind": str, "values": dict, "hashes": dict, "ids": dict, "starts": dict}


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
    need(
        type(value) is dict and required.keys() <= value.keys() <= required.keys() | set(optional),
        "wrong fields",
    )
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
    need(
        made.itemsize and not made.hasobject and made == made.newbyteorder("<"),
        f"dtype {dtype} is not allowed",
    )
    return made, "uint8", [made.itemsize]


def hash_of(key):
    """The hash of a key, section 16."""
    x = key % 2**64 if type(key) is int else 0xCBF29CE484222325
    for byte in key.encode() if type(key) is str else ():
        x = (x ^ byte) * 0x100000001B3 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


class Store:
    """An open store: ``tables`` (rows in node id order), ``rows`` (in row order), ``arrays``, ``graphs``
    (offsets and sources, both of rows); all by name. ``compiled``, ``family``: what the manifest says of a
    compiled trace, of a split, or None. ``edge_ids``, ``weights``, ``times``: of edges by graph, None where
    there are none; ``edge_types``: of graphs that have one. ``keys``: of nodes by table, as int or str.
    ``lists``: of a part whose graphs are split."""

    def __init__(self, path):
        self.path = path
        with open(os.path.join(path, "featstore.json"), "rb") as file:
            text = file.read(2**28 + 1)
        need(len(text) <= 2**28, "the manifest is too large")
        m = self.manifest = json.loads(text, object_pairs_hook=unique)
        need(
            type(m) is dict and m.get("format") == "featstore" and m.get("version") == 1,
            "not a store of version 1",
        )
        features = m.get("reader_features")
        need(
            type(features) is list
            and set(features)
            <= {
                "graphs",
                "edge_ids",
                "compiled",
                "family",
                "gathered",
                "split-graphs",
                "relations",
                "edge_values",
                "split-values",
                "keys",
            },
            "it needs features this reader lacks",
        )
        need(
            re.fullmatch(
                "g[0-9]{6,}",
                fields(m, MANIFEST, ("graphs", "compiled", "family", "featureless", "keys"))["generation"],
            ),
            "generation",
        )
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
        self.edge_types, self.graphs, parts = {}, {}, {}
        for n, g in m.get("graphs", {}).items():
            edge_type = self.edge_type(name(n), fields(g, GRAPH, GRAPH_MAY))
            offsets, sources, parts[n] = self.graph(g)
            self.graphs[n] = offsets, sources
            self.edge_types |= {n: edge_type} if edge_type else {}
        self.edge_ids, self.weights, self.times = (
            {n: found.get(part) for n, found in parts.items()} for part in EDGE_PARTS
        )
        self.featureless = m.get("featureless", [])
        need(type(self.featureless) is list, "featureless")
        need(
            "relations" in features or not (self.edge_types or self.featureless),
            "types of edges without the feature",
        )
        need(
            not {end for s, _, t in self.edge_types.values() for end in (s, t)} & self.edge_types.keys(),
            "edges between edges",
        )
        need(len(set(self.featureless)) == len(self.featureless), "a table without features, twice")
        for n in self.featureless:
            need(n in self.rows and self.rows[n].dtype == np.uint8 and self.rows[n].ndim == 1, "featureless")
            need(not self.rows[n].any(), "a table without features is not all zero")
        need(
            "compiled" in features or "compiled" not in m, "a compiled trace without the feature of that name"
        )
        need("compiled" in m or "gathered" not in features, "gathered rows of no compiled trace")
        self.compiled = self.checked(fields(m["compiled"], COMPILED)) if "compiled" in m else None
        need("family" in features or "family" not in m, "a family without the feature of that name")
        need("keys" in features or not m.get("keys"), "keys without the feature of that name")
        self.keys = {
            n: self.named(len(self.rows[name(n)]), fields(k, KEYS, ("offsets",)))
            for n, k in m.get("keys", {}).items()
        }
        self.lists, self.list_parts = {}, {}
        self.family = self.related(fields(m["family"], FAMILY, FAMILY_MAY)) if "family" in m else None

    def inside(self, path):
        part = r"/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}"
        need(re.fullmatch(f"{self.manifest['generation']}({part})+", path), f"path {path}")
        return path

    def read(self, path, bytes, digest):
        full = os.path.join(self.path, self.inside(path))
        need(
            os.path.realpath(full) == os.path.join(os.path.realpath(self.path), path),
            f"{path} is behind a link",
        )
        need(
            os.path.exists(full) and stat.S_ISREG(os.lstat(full).st_mode), f"{path} is missing or not a file"
        )
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
        said = (
            z["zarr_format"],
            z["node_type"],
            z["shape"],
            z["data_type"],
            z["chunk_grid"],
            z["chunk_key_encoding"],
        )
        need(
            said == (3, "array", shape + extra, stored, grid, key),
            f"{path}/zarr.json contradicts the manifest",
        )
        need([codec["name"] for codec in z["codecs"]] == ["bytes"], f"{path} is encoded")
        return made, len(shape + extra)

    def chunk(self, path, size):
        need(
            path in self.files and len(self.files[path]) == size,
            f"{path} is not a listed file of {size} bytes",
        )
        return self.files[path]

    def array(self, entry):
        shape = fields(entry, ARRAY)["shape"]
        need(len(shape) <= 31 and all(type(n) is int and n >= 0 for n in shape), f"shape {shape}")
        need(math.prod(n for n in shape if n) <= 2**48, f"shape {shape}")
        dtype, axes = self.zarr(entry["path"], shape, shape, entry["dtype"])
        size = math.prod(shape) * dtype.itemsize
        data = self.chunk(entry["path"] + "/c" + ".0" * axes, size) if size else b""
        return np.frombuffer(data, dtype).reshape(shape)

    def table(self, t):
        """(rows in row order, row_of_node or None)"""
        rows, shape, per_chunk, row_bytes = t["rows"], t["row_shape"], t["rows_per_chunk"], t["row_bytes"]
        need(
            0 <= rows <= 2**40
            and all(type(n) is int and n >= 1 for n in shape)
            and per_chunk >= 1
            and len(shape) <= 31,
            "table shape",
        )
        dtype, axes = self.zarr(t["path"], [rows, *shape], [per_chunk, *shape], t["dtype"])
        need(
            row_bytes == math.prod(shape) * dtype.itemsize <= 2**26 and rows * row_bytes < 2**62, "row bytes"
        )
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
        need(
            row_of_node is None or (row_of_node[maps["node_of_row"]] == np.arange(rows)).all(),
            "maps are not inverse",
        )
        return row_of_node

    def numbers(self, t, dtypes):
        """A table of plain numbers, part of a graph."""
        values, row_of_node = self.table(fields(t, TABLE))
        need(
            values.ndim == 1 and values.dtype in dtypes and row_of_node is None,
            "a graph's tables are plain numbers",
        )
        return values

    def edge_type(self, n, g):
        """(source table, relation, table); None of a graph without"""
        need(("relation" in g) == ("source_table" in g), "a relation or its table of sources alone")
        if "relation" not in g:
            return None
        found = g["source_table"], g["relation"], g["table"]
        need(all(type(part) is str and part for part in found), "an edge type")
        need(n == "__".join(found), "a graph's name is not its edge type")
        return found

    def graph(self, g):
        """(offsets, sources, what else there is of its edges)"""
        of_sources = g.get("source_table", g["table"])
        need(g["table"] in self.rows and of_sources in self.rows, "a graph without its table")
        rows, source_rows = len(self.rows[g["table"]]), len(self.rows[of_sources])
        offsets, sources = self.numbers(g["offsets"], ["<i8"]), self.numbers(g["sources"], ["<i4", "<i8"])
        need((len(offsets), len(sources)) == (rows + 1, g["edges"]), "a graph's offsets and sources")
        need(
            offsets[0] == 0 and offsets[-1] == g["edges"] and (np.diff(offsets) >= 0).all(),
            "a graph's offsets",
        )
        need(((sources >= 0) & (sources < source_rows)).all(), "a graph's sources are no rows of its table")
        parts = self.edge_parts(g, offsets, g["edges"], {"edge_ids": "edge_ids"})
        if g.get("hubs") is not None:
            hubs = fields(g["hubs"], HUBS, EDGE_PARTS)
            need(hubs.keys() & EDGE_PARTS.keys() == parts.keys(), "a graph, or its hubs, have more of edges")
            hub_rows, ends = self.array(hubs["rows"]), self.array(hubs["offsets"])
            need(hub_rows.dtype in ("<i4", "<i8") and hub_rows.ndim == 1 and ends.dtype == "<i8", "hubs")
            found = hub_rows.tolist()
            need(
                len(set(found)) == len(found) and set(found) <= set(range(rows)), "hubs are not distinct rows"
            )
            degrees = [offsets[r + 1] - offsets[r] for r in found]
            need(ends.tolist() == [0, *np.cumsum(degrees, dtype=int).tolist()], "hub offsets")
            for part, values in ({"sources": sources} | parts).items():
                copy = self.numbers(hubs[part], EDGE_PARTS.get(part, ["<i4", "<i8"]))
                lists = [values[offsets[r] : offsets[r + 1]] for r in found]
                need(
                    np.array_equal(np.concatenate([*lists, values[:0]]), copy)
                    and (part != "weights" or copy.dtype == values.dtype),
                    "hubs' lists are not the lists they copy",
                )
        return offsets, sources, parts

    def edge_parts(self, g, offsets, edges, features):
        """What there is of each edge beside its source; edge ids are of 0 to ``edges`` - 1."""
        parts = {part: self.numbers(g[part], dtypes) for part, dtypes in EDGE_PARTS.items() if part in g}
        needed = {features.get(part, "edge_values") for part in parts}
        need(needed <= set(self.manifest["reader_features"]), f"what needs the feature {needed}")
        need(all(len(values) == offsets[-1] for values in parts.values()), "a graph's edges")
        ids, weights = parts.get("edge_ids"), parts.get("weights")
        need(
            ids is None or (((ids >= 0) & (ids < edges)).all() and len(np.unique(ids)) == len(ids)),
            "a graph's edge ids",
        )
        need(weights is None or (np.isfinite(weights) & (weights >= 0)).all(), "a graph's weights")
        falls = np.flatnonzero(parts["times"][1:] < parts["times"][:-1]) + 1 if "times" in parts else []
        need(set(falls) <= set(offsets.tolist()), "a graph's times do not ascend in each list")
        return parts

    def named(self, rows, k):
        """The keys of a table's nodes, by node id; the index is what it should be."""
        need(k["kind"] in ("int64", "utf8") and ("offsets" in k) == (k["kind"] == "utf8"), "a kind of keys")
        values = self.numbers(k["values"], ["|u1"] if "offsets" in k else ["<i8"])
        if "offsets" in k:
            ends = self.numbers(k["offsets"], ["<i8"])
            need(len(ends) == rows + 1 and ends[0] == 0 and ends[-1] == len(values), "offsets of keys")
            need((np.diff(ends) >= 0).all() and (np.diff(ends) <= 2**16).all(), "offsets of keys")
            keys = [values[a:b].tobytes().decode() for a, b in pairwise(ends.tolist())]
        else:
            keys = values.tolist()
        need(len(keys) == len(set(keys)) == rows, "keys are not one for each node, all different")
        found = [hash_of(key) for key in keys]
        order = sorted(range(rows), key=lambda node: (found[node], node))
        need(self.numbers(k["ids"], ["<i4", "<i8"]).tolist() == order, "the ids of an index of keys")
        need(self.numbers(k["hashes"], ["<u8"]).tolist() == sorted(found), "the hashes of an index of keys")
        starts = self.numbers(k["starts"], ["<i8"]).tolist()
        bits = (len(starts) - 1).bit_length() - 1
        need(0 <= bits <= 40 and len(starts) == 2**bits + 1, "the starts of an index of keys")
        upper = [word >> 64 - bits for word in sorted(found)]
        need(starts == [bisect_left(upper, i) for i in range(len(starts))], "the starts of an index of keys")
        return keys

    def checked(self, c):
        """The description of a compiled trace; its tables and arrays are there and of the right kind."""
        records, offsets = self.rows.get(c["records"]), self.arrays.get(c["offsets"])
        need(
            c["residency"] in ("min", "fixed") and c["batches"] >= 0 <= c["memory_bytes"],
            "residency, batches or memory",
        )
        need(records is not None and records.ndim == 1 and records.dtype == np.uint8, "records")
        need(
            offsets is not None and offsets.dtype == "<i8" and offsets.shape == (c["batches"] + 1,), "offsets"
        )
        need(
            offsets[0] == 0 and offsets[-1] == len(records) and (np.diff(offsets) >= 0).all(),
            "offsets of records",
        )
        for n, t in c["tables"].items():
            need(
                all(fields(t, COMPILED_TABLE)[part] in self.rows for part in PARTS),
                f"the tables of {name(n)}",
            )
            kinds = [self.manifest["tables"][t[part]] for part in PARTS]
            need(
                len({(*k["row_shape"], k["dtype"]) for k in kinds}) == 1,
                f"the tables of {n} have rows of several kinds",
            )
            need(not any(k["order"].get("row_of_node") for k in kinds), f"a table of {n} is permuted")
            turn = self.arrays.get(t["turn"])
            need(
                turn is not None and turn.dtype == "<i4" and turn.shape == (len(self.rows[t["resident"]]),),
                f"the turn of {n}",
            )
            there = turn[turn >= 0].tolist()
            need(
                (turn >= -1).all() and len(set(there)) == len(there) and set(there) <= set(range(len(turn))),
                f"the turn of {n}",
            )
            need(0 <= t["base_rows"] <= 2**40 and t["batch_rows_max"] >= 0, f"rows of {n}")
        return c

    def related(self, f):
        """The description of a family, held against the store's tables, graphs and halos."""
        hosts, host = f["hosts"], f.get("host")
        need(1 <= hosts <= 2**16 and ("host" in f) == ("uuid" in f), "hosts")
        need(host is None or (type(host) is int and 0 <= host < hosts), "host")
        uuid = "[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        need(all(re.fullmatch(uuid, f[key]) for key in ("base_uuid", "uuid") if key in f), "uuids")
        copies = (
            {n + ".halo" for n in f["first_rows"]} - f["first_rows"].keys() if host is not None else set()
        )
        own = self.rows.keys() - copies
        split = f.get("split_graphs", {})
        need(
            not split or "split-graphs" in self.manifest["reader_features"],
            "split graphs without the feature",
        )
        graphs = split.keys() if split and host is None else self.graphs.keys()
        need(own == f["first_rows"].keys() and f["remote_edges"].keys() == graphs,
             "a family of other tables or graphs")  # fmt: skip
        need(
            not split or (not self.graphs if host is None else split.keys() == self.graphs.keys()),
            "split graphs",
        )
        self.lists = {
            name(n): self.whole_lists(n, fields(g, SPLIT_GRAPH, ("lists", "relation", "source_table")), f)
            for n, g in split.items()
        }
        for n in copies & self.rows.keys():
            nodes = self.arrays[n + "_nodes"]
            need(len(nodes) == len(self.rows[n]) == len(np.unique(nodes)), f"the nodes of {n}")
        for n, first in f["first_rows"].items():
            need(len(first) == hosts + 1 and all(type(r) is int and 0 <= r <= 2**40 for r in first), "rows")
            need(first[0] == 0 and first == sorted(first), f"first rows of {n}")
            rows = self.rows[n]
            need(len(rows) == (first[-1] if host is None else first[host + 1] - first[host]), f"rows of {n}")
            if host is None:
                need(rows.ndim == 1 and rows.dtype == ("<u1" if hosts <= 256 else "<u2"), f"hosts of {n}")
                counts = np.bincount(rows, minlength=hosts)
                need(counts.tolist() == np.diff(first).tolist(), f"hosts of {n} are not as often as is said")
        for n, edges in f["remote_edges"].items():
            need(len(edges) == hosts and all(type(e) is int and 0 <= e <= 2**40 for e in edges), "edges")
            if host is None and split:
                need(sum(edges) <= split[n]["edges"], f"remote edges of {n}")
                continue
            if host is None:
                g, (offsets, sources) = self.manifest["graphs"][n], self.graphs[n]
                target = np.repeat(self.rows[g["table"]], np.diff(offsets))
                owner = self.rows[g.get("source_table", g["table"])]
                found = np.bincount(target[owner[sources] != target], minlength=hosts)
                need(found.tolist() == edges, f"remote edges of {n} are not as many as is said")
                continue
            ids, uses = (self.arrays.get(f"{n}.{what}") for what in ("halo_ids", "halo_uses"))
            need(ids is not None and ids.dtype in ("<i4", "<i8") and (np.diff(ids) > 0).all(), "halo ids")
            need(uses is not None and uses.dtype == "<u4" and uses.shape == ids.shape, "uses of a halo")
            if not (uses == 2**32 - 1).any():
                need(int(uses.sum(dtype=np.int64)) == edges[host], "uses of a halo")
        return f

    def whole_lists(self, n, g, f):
        """(offsets, sources, number in the base store of each list's first edge) of a graph that is split,
        of a part; None of the topology."""
        need(g["table"] in f["first_rows"] and 0 <= g["edges"] <= 2**40, f"the split graph {n}")
        need(("lists" in g) == ("host" in f), f"the lists of {n} are in parts alone")
        typed = "relation" in g
        need(typed == ("source_table" in g), f"the edge type of {n}")
        need(not typed or "relations" in self.manifest["reader_features"], f"the edge type of {n}")
        need(g.get("source_table", g["table"]) in f["first_rows"], f"the sources of {n}")
        if "lists" not in g:
            return None
        lists, rows = fields(g["lists"], LISTS, EDGE_PARTS), len(self.rows[g["table"]])
        own = self.manifest["graphs"][n]
        for key in ("table", "relation", "source_table"):
            need(own.get(key) == g.get(key), f"the {key} of {n}")
        offsets, sources = (
            self.numbers(lists["offsets"], ["<i8"]),
            self.numbers(lists["sources"], ["<i4", "<i8"]),
        )
        need(
            len(offsets) == rows + 1 and offsets[0] == 0 and offsets[-1] == len(sources), f"the lists of {n}"
        )
        need((np.diff(offsets) >= 0).all() and len(sources) <= g["edges"], f"the lists of {n}")
        need(
            ((sources >= 0) & (sources < f["first_rows"][g.get("source_table", g["table"])][-1])).all(),
            f"nodes in the lists of {n}",
        )
        split = dict.fromkeys(EDGE_PARTS, "split-values")
        self.list_parts[n] = self.edge_parts(lists, offsets, g["edges"], split)
        first, edges = self.array(lists["run_rows"]), self.array(lists["run_edges"])
        need(first.dtype == edges.dtype == "<i8" and first.shape == edges.shape and first.ndim == 1, "runs")
        need(rows == 0 or (len(first) and first[0] == 0), "runs")
        need((np.diff(first) > 0).all() and (first < rows).all(), "runs")
        need(((edges >= 0) & (edges <= g["edges"])).all(), "runs")
        run = np.searchsorted(first, np.arange(rows), "right") - 1
        degrees, graphs = self.arrays.get(f"{n}.halo_degrees"), self.manifest["graphs"].items()
        halo = [m for m, one in graphs if one.get("source_table", one["table"]) == g["table"]]
        ids = np.unique(np.concatenate([[], *(self.arrays[f"{m}.halo_ids"] for m in halo)]))
        need(degrees is not None and degrees.dtype == "<i8", "degrees of a halo")
        need(degrees.shape == ids.shape and (degrees >= 0).all(), "degrees of a halo")
        return offsets, sources, edges[run] + offsets[:-1] - offsets[first[run]]

    def mini_batches(self, base):
        """Of each mini-batch of a compiled trace: (rows by table of the base store, bytes of the sample)."""
        c, tables = self.compiled, self.compiled["tables"]
        need(
            c["base_uuid"] == base.manifest["uuid"],
            "it was compiled for another base store, or another state of it",
        )
        base = self if "gathered" in self.manifest["reader_features"] else base
        for n, t in tables.items():
            kinds = [
                (s.manifest["tables"][m]["row_shape"], s.manifest["tables"][m]["dtype"])
                for s, m in ((self, t["packed"]), (base, n))
            ]
            need(
                kinds[0] == kinds[1] and len(base.rows[n]) == t["base_rows"],
                f"table {n} is not that of the base store",
            )
        slots = {n: self.rows[t["resident"]].copy() for n, t in tables.items()}
        records, ends = self.rows[c["records"]].tobytes(), self.arrays[c["offsets"]].tolist()
        for low, high in pairwise(ends):
            record, out = records[low:high], {}
            size, sample, sample_bytes = struct.unpack_from("<3q", record)
            at = 24 + 136 * len(tables)
            need(
                size == len(record) and size % 64 == sample % 64 == 0 <= sample_bytes <= size - sample,
                "a record's head",
            )
            for number, (n, t) in enumerate(tables.items()):
                count, host, first, *lengths = struct.unpack_from("<17q", record, 24 + 136 * number)
                a = {}
                for key, length in zip(RECORD, lengths, strict=True):
                    item = 8 if key.endswith("_row") else 4
                    need(0 <= length <= (sample - at) // item, "a record's array")
                    a[key] = np.frombuffer(record, f"<i{item}", length, at)
                    at += -(-length * item // 8) * 8
                out[n] = self.assemble(a, count, host, first, t, base.rows[n], slots[n])
                need(c["residency"] == "min" or not len(a["admit_slot"]), "a fixed residency that admits")
            need(at <= sample, "a record's sample")
            yield out, record[sample : sample + sample_bytes]
        for n, t in tables.items():
            turn, first_rows = self.arrays[t["turn"]], self.rows[t["resident"]]
            same = slots[n][turn[turn >= 0]].tobytes() == first_rows[turn >= 0].tobytes()
            need(same or not c["batches"], f"the turn of {n}: the rows of the begin are elsewhere")

    def assemble(self, a, count, host, first, t, base, slots):
        """The rows of one table in one mini-batch, after which ``slots`` are as the next mini-batch finds
        them."""
        packed, shared, _, device = (self.rows[t[part]] for part in PARTS)
        need(0 <= host <= count <= t["batch_rows_max"], "rows of a mini-batch")
        need(0 <= first <= len(packed) - len(a["packed_place"]), "a run of packed rows")
        x = np.empty((host, *packed.shape[1:]), packed.dtype)
        filled = [a[f"{way}_place"] for way in ("hit", "packed", "shared", "base")]
        for place, rows, index in (
            (filled[0], slots, a["hit_slot"]), (filled[1], packed, np.arange(first, first + len(filled[1]))),
            (filled[2], shared, a["shared_row"]), (filled[3], base, a["base_row"]),
            (a["copy_place"], x, a["copy_from"]),
        ):  # fmt: skip
            need(
                len(place) == len(index) and all(0 <= i < len(rows) for i in index.tolist()),
                "an index into rows",
            )
            need(all(0 <= p < host for p in place.tolist()), "a place")
            x[place] = rows[index]
        need(
            sorted(np.concatenate([*filled, a["copy_place"]]).tolist()) == list(range(host)),
            "rows are not filled once each",
        )
        need(set(a["copy_from"].tolist()) <= set(np.concatenate(filled).tolist()), "a copy of a copy")
        admitted = a["admit_slot"].tolist()
        need(
            len(set(admitted)) == len(admitted) == len(a["admit_place"])
            and set(admitted) <= set(range(len(slots))),
            "slots",
        )
        need(set(a["admit_place"].tolist()) <= set(range(host)), "a place that is admitted")
        origin = dict(zip(a["copy_place"].tolist(), a["copy_from"].tolist(), strict=True))
        brought = [origin.get(place, place) for place in a["admit_place"].tolist()]
        need(len(set(brought)) == len(brought), "a row that is admitted twice")
        need(not set(brought) & set(a["hit_place"].tolist()), "a row that is admitted and was in a slot")
        slots[a["admit_slot"]] = x[a["admit_place"]]
        if len(device) == 0:
            need(
                host == count and not len(a["device_place"]) and not len(a["host_place"]),
                "rows of a device without any",
            )
            return x
        rows = np.empty((count, *x.shape[1:]), x.dtype)
        places = np.concatenate([a["device_place"], a["host_place"]]).tolist()
        need(sorted(places) == list(range(count)) and len(a["host_place"]) == host, "places beside a device")
        need(len(a["device_place"]) == len(a["device_slot"]), "places beside a device")
        need(all(0 <= i < len(device) for i in a["device_slot"].tolist()), "an index into a device's rows")
        rows[a["device_place"]], rows[a["host_place"]] = device[a["device_slot"]], x
        return rows


if __name__ == "__main__":
    packs, compiled = os.path.join(sys.argv[1], "packs"), {}
    try:
        store = Store(sys.argv[1])
        for n in sorted(os.listdir(packs)) if os.path.isdir(packs) else ():
            if os.path.exists(os.path.join(packs, n, "featstore.json")):
                made = Store(os.path.join(packs, n))
                stale = made.compiled["base_uuid"] != store.manifest["uuid"]
                compiled[n] = None if stale else sum(1 for _ in made.mini_batches(store))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{sys.argv[1]}: {error!r}")
    for what, found in (("table", store.tables), ("array", store.arrays)):
        for n, values in found.items():
            print(f"{what} {n}: {list(values.shape)} {values.dtype}")
    for n, (offsets, sources) in store.graphs.items():
        kinds = [part for part in EDGE_PARTS if getattr(store, part)[n] is not None]
        print(f"graph {n}: {len(offsets) - 1} rows, {len(sources)} edges {' '.join(kinds)}".rstrip())
    for n, keys in store.keys.items():
        print(f"keys {n}: {len(keys)}")
    if store.family:
        of = "the topology" if "host" not in store.family else f"host {store.family['host']}"
        print(f"{of} of a split of {store.family['hosts']} hosts")
    for n, batches in compiled.items():
        told = "of another state of the store" if batches is None else f"{batches} mini-batches"
        print(f"compiled trace {n}: {told}")
