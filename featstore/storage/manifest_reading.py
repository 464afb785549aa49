"""A manifest from its file: parsed and checked at the border.

It may come from a stranger, so its size is bounded and its versions are looked at before anything is made of
the rest.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from featstore.base.files import read_small
from featstore.base.system import asking, is_there, refusal
from featstore.errors import (
    CorruptionError,
    DeviceError,
    FormatError,
    FormatVersionError,
    IncompleteStoreError,
)
from featstore.storage.manifest import (
    CATALOGUE_BYTES_MAX,
    FORMAT_VERSION,
    GENERATION_NAME,
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    NOT_JSON,
    PROVENANCE_BYTES_MAX,
    READER_FEATURES,
    TOPOLOGY,
    FileEntry,
    Manifest,
)
from featstore.storage.manifest_checks import check_manifest

_ADVICE = "restore it from a copy, or pack the store again"
_SHORT_BYTES = 2**16  # of a field that is looked at before the others


def read_manifest(store: Path) -> tuple[Manifest, bytes]:
    """The manifest of a store, validated, and its bytes.

    Raises IncompleteStoreError where there is no committed store, FormatVersionError where it needs a newer
    featstore and FormatError where it cannot be trusted.
    """
    path = store / MANIFEST_NAME
    try:
        text = read_small(path, MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        raise IncompleteStoreError(_what_is_there(store)) from None
    except DeviceError as error:
        if error.errno != errno.ENOTDIR:
            raise
        raise IncompleteStoreError(f"{store} is a file, not a featstore store (a directory)") from None
    return parse(text, path), text


def is_current(store: Path, text: bytes, *, pinned: bool) -> bool:
    """Whether a manifest that was read is still the store's, now that its generation is held. One that is
    ``pinned`` may be of an earlier generation, or of a store that is removed; but not of one that another has
    replaced since, under the same number. Raises FormatError, DeviceError."""
    path = store / MANIFEST_NAME
    try:
        now = read_small(path, MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return pinned
    if now == text or not pinned:
        return now == text
    return parse(now, path).generation != parse(text, path).generation


def check_files(store: Path, files: Sequence[FileEntry]) -> None:
    """Raise CorruptionError unless these files of a store are there, each with its size, FormatError for a
    symbolic link on the way, DeviceError."""
    root, folders = str(store), set()
    for entry in files:
        above = entry.path.rpartition("/")[0]
        while above and above not in folders:
            folders.add(above)
            above = above.rpartition("/")[0]
    for folder in folders:
        if os.path.islink(os.path.join(root, folder)):
            raise FormatError(f"{store / folder} leads out of the store through a symbolic link")
    for entry in files:
        path = os.path.join(root, entry.path)
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise CorruptionError(path, None, f"a file of {entry.bytes:,} bytes", "no file") from None
        except OSError as error:
            raise refusal(error, path, "look at") from error
        if not stat.S_ISREG(status.st_mode):
            raise CorruptionError(path, None, "a regular file", "a link or something else")
        size = status.st_size
        if size != entry.bytes:
            raise CorruptionError(path, None, f"a file of {entry.bytes:,} bytes", f"{size:,} bytes")


def _what_is_there(store: Path) -> str:
    if not is_there(store):
        return f"there is no store at {store}; check the path, or pack one there"
    with asking(store, "list"):
        entries = list(store.iterdir())
    if any(GENERATION_NAME.fullmatch(entry.name) for entry in entries):
        return (
            f"{store} holds an unfinished pack and no committed store; run the same `featstore pack` "
            "again with --resume, or with --overwrite to start anew"
        )
    if is_there(store / TOPOLOGY / MANIFEST_NAME):
        return (
            f"{store} holds the parts of a split store, and is none itself: give one of them, {TOPOLOGY} or "
            "host-N (to train: open_split)"
        )
    return f"{store} is not a featstore store: it has no {MANIFEST_NAME}"


def parse(text: bytes, path: Path) -> Manifest:
    """A manifest from its bytes, validated; errors name ``path``."""
    if len(text) > MANIFEST_BYTES_MAX:
        raise FormatError(f"{path} is larger than {MANIFEST_BYTES_MAX:,} bytes; it cannot be a manifest")
    parts = _parts(text, path)
    if _plain(parts.format) != "featstore":
        raise FormatError(f"{path} is not a featstore manifest")
    version, features = _plain(parts.version), _plain(parts.reader_features)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{path} has no usable format version: {version!r}")
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{path} has format version {version}; this featstore reads up to {FORMAT_VERSION}: "
            "install a newer one"
        )
    if isinstance(features, list):
        unknown = sorted({str(f) for f in features} - READER_FEATURES)
        if unknown:
            raise FormatVersionError(
                f"{path} needs reader features this featstore lacks: {', '.join(unknown)}; install a "
                "newer one"
            )
    provenance, catalogue = memoryview(parts.provenance).nbytes, len(text) - memoryview(parts.files).nbytes
    if provenance > PROVENANCE_BYTES_MAX or catalogue > CATALOGUE_BYTES_MAX:
        raise FormatError(
            f"{path} has {provenance:,} bytes of provenance (at most {PROVENANCE_BYTES_MAX:,}) and "
            f"{catalogue:,} bytes beside its list of files (at most {CATALOGUE_BYTES_MAX:,}); it "
            "cannot be a manifest"
        )
    try:
        msgspec.json.decode(parts.files, type=list[FileEntry])  # else looking for keys makes much of little
        _check_keys(text, path)
        manifest = msgspec.json.decode(text, type=Manifest)
        check_manifest(manifest)
    except NOT_JSON as error:
        raise FormatError(f"{path} is malformed: {error}; {_ADVICE}") from None
    except FormatError as error:
        raise FormatError(f"{path} cannot be trusted: {error}; {_ADVICE}") from None
    return manifest


class _Parts(msgspec.Struct):
    """The texts of a manifest's fields: what tells which reader it needs, and what may be long."""

    format: msgspec.Raw = msgspec.Raw(b"null")
    version: msgspec.Raw = msgspec.Raw(b"null")
    reader_features: msgspec.Raw = msgspec.Raw(b"null")
    provenance: msgspec.Raw = msgspec.Raw(b"null")
    files: msgspec.Raw = msgspec.Raw(b"[]")


def _parts(text: bytes, path: Path) -> _Parts:
    """The parts of a manifest that is JSON; nothing is made of what they say."""
    try:
        return msgspec.json.decode(text, type=_Parts)
    except msgspec.ValidationError:
        raise FormatError(f"{path} is not JSON of one object, and so not a featstore manifest") from None
    except NOT_JSON as error:
        raise FormatError(f"{path} is not JSON: {error}") from None


def _check_keys(text: bytes, path: Path) -> None:
    """Raise FormatError where an object has a key twice."""
    try:
        json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from None


def _plain(raw: msgspec.Raw) -> Any:
    """A short field's value; None for one that is not short."""
    try:
        return json.loads(bytes(raw)) if memoryview(raw).nbytes <= _SHORT_BYTES else None
    except (ValueError, RecursionError):  # a number of too many digits, say
        return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice in one object")  # caught around json.loads: a FormatError
