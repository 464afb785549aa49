"""Mutants of what stands by itself: traces, saved caches, recordings and packs that were stopped, measured
device models, the states of loaders; checksums made anew."""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mutants import Random, arrays_of, change, chunk_of, encoded, inside, places, spoil, spoil_text
from numpy.typing import NDArray

from featstore.base.checksum import crc_pages, digest_of_checksums
from featstore.base.dtypes import dtype_from_name
from featstore.trace import log_format as layout


class Folder:
    """A directory whose files may be changed in any way; ``restore`` makes it what it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        self._folders = [p.relative_to(path) for p in path.rglob("*") if p.is_dir()]

    def restore(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        for folder in sorted(self._folders):
            (self.path / folder).mkdir()
        for relative, data in self.files.items():
            (self.path / relative).write_bytes(data)


# Traces.


class TraceMutants:
    """A finished log, of which mutants are made; the first frames of it are the log of a recording."""

    def __init__(self, path: Path, right: bytes) -> None:
        data = self._right = np.frombuffer(right, np.uint8)
        self._tail_at = len(data) - layout.TAIL_BYTES
        self._index_at, _, frames, _, _, _ = layout._get(
            data[self._tail_at :], layout.START_BYTES, layout._TAIL
        )
        self._head_bytes = int(layout._get(data, 0, layout._START)[3])
        types = len(layout.decode_head(data[: self._head_bytes], path).node_types)
        block = data[self._index_at : self._tail_at]
        index = layout.decode_index(block, frames, types, path, self._index_at)
        offsets = index.offsets.tolist()
        self._bounds = list(zip(offsets[:-1], index.front_bytes.tolist(), offsets[1:], strict=True))

    def trace(self, path: Path, rng: Random) -> str:
        """Write a trace with something changed, its blocks sealed again; says what."""
        data = self._right.copy()
        index = layout.decode_index(
            data[self._index_at : self._tail_at], len(self._bounds), 1, path, self._index_at
        )
        what = self._spoil(data, rng, self._bounds, 6)
        self._seal(data, self._bounds, None if "index" in what else index)
        layout._seal(data[self._index_at : self._tail_at], layout.INDEX, 0)
        digest = layout.digest_of(data[: self._head_bytes], index.front_crcs)
        if "tail" not in what or rng.random() < 0.7:
            at = self._tail_at + layout.START_BYTES + struct.calcsize("<QQQQ")
            data[at : at + 48] = np.frombuffer(
                digest + bytes.fromhex(layout.trace_uuid(digest).replace("-", "")), np.uint8
            )
        layout._seal(data[self._tail_at :], layout.TAIL, 0)
        path.write_bytes(data.tobytes())
        return "trace " + ", ".join(what)

    def recording(self, folder: Folder, rng: Random) -> str:
        """Write the log of a recording, or its checkpoint, with something changed; says what."""
        log, checkpoint = folder.path / "recording.log", folder.path / "recording.json"
        right = folder.files[Path("recording.log")]
        data, what = np.frombuffer(right, np.uint8).copy(), []
        if rng.random() < 0.7:
            bounds = [one for one in self._bounds if one[2] <= len(data)]
            what = self._spoil(data, rng, bounds, 3)
            self._seal(data, bounds, None)
            if rng.random() < 0.2:  # a length that is none, or a number that is another's
                blocks = [(0, self._head_bytes), *((a, a + f) for a, f, _ in bounds)]
                begin, end = blocks[rng.integers(len(blocks))]
                at = begin + (12 if rng.random() < 0.3 else 16)
                words = data[at : begin + 24 if at > begin + 12 else at + 4].view(
                    "<i8" if at > begin + 12 else "<i4"
                )
                words[:] = np.resize(spoil(words, rng), 1)
                crc = layout.checksum(data[begin + 12 : end])
                data[begin + 8 : begin + 12] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
                what.append("start")
            raw = data.tobytes()
            if rng.random() < 0.3:
                at = int(rng.integers(len(raw)))
                raw = raw[:at] if rng.random() < 0.5 else raw + raw[at:]
                what.append("length")
            log.write_bytes(raw)
        if not what or rng.random() < 0.2:
            text = folder.files[Path("recording.json")]
            found = msgspec.json.decode(text)
            checkpoint.write_bytes(spoil_text(encoded(change(found, rng, places(found))), rng))
            what.append("checkpoint")
        return "recording " + ", ".join(what)

    def _seal(self, data: NDArray[np.uint8], bounds: list[tuple[int, int, int]], index: Any) -> None:
        layout._seal(data[: self._head_bytes], layout.HEAD, layout.VERSION)
        for number, (begin, front, end) in enumerate(bounds):
            sample_crc = layout.checksum(data[begin + front : end])
            layout._seal(data[begin : begin + front], layout.FRAME, sample_crc)
            if index is not None:
                index.sample_crcs[number] = sample_crc
                index.front_crcs[number] = layout._crc_in(data[begin : begin + front])

    def _spoil(
        self, data: NDArray[np.uint8], rng: Random, bounds: list[tuple[int, int, int]], parts: int
    ) -> list[str]:
        """Change something in one or two of the first ``parts`` of a log; which."""
        what = []
        for _ in range(rng.integers(1, 3)):
            how, (begin, front, end) = rng.integers(parts), bounds[rng.integers(len(bounds))]
            low, high = [
                (0, self._head_bytes),
                (begin, begin + front),
                (begin + front, end),
                (self._index_at, self._tail_at),
                (self._index_at, self._tail_at),
                (self._tail_at, len(data)),
            ][how]
            what.append(["head", "front", "sample", "index", "index", "tail"][how])
            start = 0 if how == 2 else layout.START_BYTES
            if high - low <= start:
                continue
            if how in (0, 2) or rng.random() < 0.15:  # text, MessagePack
                at = low + start + int(rng.integers(high - low - start))
                data[at] = rng.choice(
                    [
                        0,
                        1,
                        0x7F,
                        0x80,
                        0x90,
                        0x9F,
                        0xC0,
                        0xCF,
                        0xDD,
                        0xDF,
                        0xFF,
                        data[at] ^ 1,
                        rng.integers(256),
                    ]
                )
            else:
                words = data[low + start : high].view("<i8")
                at = int(rng.integers(len(words)))
                words[at] = np.resize(spoil(words[at : at + 1], rng), 1)[0]
        return what


# Saved caches.


def mutate_cache(path: Path, right: bytes, rng: Random) -> str:
    """Write a saved cache with something changed, and its checksum; says what."""
    size = int.from_bytes(right[:4], "little")
    header, ids = msgspec.msgpack.decode(right[4 : 4 + size]), np.frombuffer(right[4 + size : -4], np.uint8)
    what = "ids"
    if rng.random() < 0.5:
        changed = spoil(ids.view("<i8"), rng)
        if rng.random() < 0.8:
            header["tables"]["features"] = len(changed)
        ids = changed.view(np.uint8)
    else:
        what, header = "header", change(header, rng, places(header))
    try:
        data = msgspec.msgpack.encode(header)
    except (OverflowError, TypeError):  # no number of MessagePack
        data = right[4 : 4 + size]
    if rng.random() < 0.1:
        data = data[: rng.integers(len(data) + 1)]
    body = len(data).to_bytes(4, "little") + data + ids.tobytes()
    path.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    return f"saved cache {what}"


# Packs that were stopped.


def mutate_unfinished(folder: Folder, rng: Random) -> tuple[list[str], str]:
    """Change the journal of a pack or of a compilation, an array that it names (and what it says of it), or
    another file; says which kind of file, and what."""
    name = next(path for path in folder.files if path.suffix == ".journal")
    document = msgspec.json.decode(folder.files[name])
    arrays, kinds, what = arrays_of(document), [], []
    for _ in range(rng.integers(1, 3)):
        how = rng.integers(6)
        if how <= 2:
            document = change(document, rng, _of_journal(document, rng))
            kinds.append("journal")
            what.append(name.name)
            break
        if how <= 4 and arrays:
            at = arrays[rng.integers(len(arrays))]
            entry = inside(document, at)
            path = Path(chunk_of(entry))
            values = spoil(np.frombuffer(folder.files.get(path, b""), dtype_from_name(entry["dtype"])), rng)
            (folder.path / path).write_bytes(values.tobytes())
            entry["shape"] = [len(values)] if rng.random() < 0.7 else entry["shape"]
            digest = digest_of_checksums(crc_pages(values.view(np.uint8)))
            for table in document["tables"].values():
                for file in (*table["order_files"], *table["graph_files"]):
                    if file["path"] == str(path):
                        file.update(bytes=values.nbytes, digest=digest)
            kinds.append("unfinished")
            what.append(f"array {'/'.join(map(str, at))}")
        else:
            others = [path for path in folder.files if path != name]
            path = others[rng.integers(len(others))]
            data = np.frombuffer(folder.files[path], np.uint8)
            if rng.random() < 0.15:
                (folder.path / path).unlink(missing_ok=True)
            else:
                (folder.path / path).write_bytes(spoil(data.view(_words(len(data))), rng).tobytes())
            kinds.append("unfinished")
            what.append(str(path))
    (folder.path / name).write_bytes(spoil_text(encoded(document), rng))
    return kinds, ", ".join(what)


def _of_journal(document: Any, rng: Random) -> list[tuple[Any, ...]]:
    """Places in a journal; mostly in what it says of tables, and seldom in its lists of files."""
    found = places(document)
    if rng.random() < 0.8:
        found = [p for p in found if p[:1] == ("tables",) and not {"order_files", "graph_files"} & set(p)]
    return found


def _words(byte_count: int) -> str:
    return "<i8" if byte_count % 8 == 0 else "<i4" if byte_count % 4 == 0 else "u1"


# Device models, states.


def mutate_models(path: Path, right: bytes, rng: Random) -> str:
    """Write a list of device models with something changed; says what."""
    document = msgspec.json.decode(right)
    if rng.random() < 0.7:  # the same in all of them, so that whoever looks for one finds it
        first = next(iter(document.values()))
        other = change(dict(first), rng, [p for p in places(first) if p])
        document = {key: dict(other) for key in document}
    else:
        document = change(document, rng, places(document))
    path.write_bytes(spoil_text(encoded(document), rng))
    return "device models"


def mutate_state(state: Any, rng: Random) -> Any:
    """A state as it comes back from a checkpoint file, with something changed."""
    found = msgspec.json.decode(encoded(state))
    return change(found, rng, [p for p in places(found) if p or rng.random() < 0.1])
