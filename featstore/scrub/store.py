"""Scrubbing: every byte of a store read once and held against every promise the manifest makes about it.

A reader checks the pages it reads and stops at the first bad one. A scrub reads all and goes on, so that its
report is the complete list of what to restore. It needs only a readable manifest. What is held against what:

- the manifest's uuid against its text (a change to any other field shows there);
- every listed file: a regular file, of its size, with its digest, and not reached through a symbolic link;
- every page of every chunk against ``page_checksums``; those against the digests of the chunks, which tells a
  page that went bad from a checksum that did; the padding of the last chunk is zero;
- ``zarr.json`` of every array against the manifest;
- ``row_of_node`` and ``node_of_row`` are inverse permutations, ``rows_by_degree`` is one, partition offsets
  ascend (:mod:`featstore.scrub.tables`);
- the tables of graphs as any other, and what their numbers mean (:mod:`featstore.scrub.graph`);
- keys and their index, of which each must lead to the other (:mod:`featstore.scrub.keys`);
- ``rows_digest``, from end to end: the digest of (node id, row) that the pack computed over its *source*.

All passes are sequential and hold two blocks of 4 MiB (and twice the largest row); graphs are looked at in
pieces, too. That two maps are inverse to each other is therefore shown without random access: the pairs
(node, row) of both must have the same sum of 64-bit hashes. Reads are direct where the file system allows, so
that it is the device that is verified and not the page cache.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from featstore.arguments import as_callback, as_choice, as_path
from featstore.base.folders import real_path
from featstore.base.system import asking
from featstore.engine.files import Access
from featstore.errors import CorruptionError, DeviceError, IncompleteStoreError
from featstore.scrub.blocks import Blocks
from featstore.scrub.graph import scrub_graph
from featstore.scrub.keys import scrub_keys
from featstore.scrub.report import Findings, Progress, VerifyReport, listed
from featstore.scrub.tables import margin_for, scrub_featureless, scrub_metadata, scrub_table
from featstore.scrub.whole_lists import scrub_whole_lists
from featstore.storage.belongings import TEMPORARY
from featstore.storage.locks import held_with_others
from featstore.storage.manifest import MANIFEST_NAME, FileEntry, Manifest, uuid_of
from featstore.storage.manifest_reading import read_manifest

_OWN_NAMES = re.compile(
    rf"featstore\.json({TEMPORARY})?|lock|packs|caches|g[0-9]{{6,}}(\.journal({TEMPORARY})?|\.spill|)",
    re.ASCII,
)


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[Progress], None] | None = None,
    access: Access = "direct",
) -> VerifyReport:
    """Read a whole store and report everything that is not as its manifest promises; see the module's text.

    Args:
        path: the store's directory. It is not written to; its generation is held against ``featstore gc``
            meanwhile.
        progress: called after each block with a :class:`featstore.scrub.report.Progress`.
        access: ``"direct"`` to read past the page cache where the file system allows it, or ``"buffered"``.

    Needs some 16 MiB (48 MiB for graphs with hubs), and two rows, of memory beside the manifest. Raises
    IncompleteStoreError, FormatVersionError and FormatError where there is no manifest to verify against, as
    ``featstore.open`` does, and ArgumentError for another access. Whatever is wrong beyond that is in the
    report.
    """
    as_choice(access, "access", ("direct", "buffered"))
    progress = as_callback(progress, "progress")
    store = Path(os.path.abspath(as_path(path, "path")))
    manifest, text = read_manifest(store)
    hold = _hold(store, manifest)
    try:
        # a newer generation was committed before this one was held
        while (now := read_manifest(store))[0] != manifest:
            manifest, text = now
            hold, before = _hold(store, manifest), hold
            os.close(before)
        return _scrub(store, manifest, text, access, progress)
    finally:
        os.close(hold)


def _hold(store: Path, manifest: Manifest) -> int:
    """A shared lock on a generation's directory, or on the store's where that is not there, as its files will
    tell."""
    try:
        held = held_with_others(store / manifest.generation)
    except (CorruptionError, DeviceError):
        held = None
    if held is None:
        held = held_with_others(real_path(store))
    if held is None:
        raise IncompleteStoreError(f"{store} was removed meanwhile")
    return held


def _scrub(
    store: Path, manifest: Manifest, text: bytes, access: Access,
    progress: Callable[[Progress], None] | None,
) -> VerifyReport:  # fmt: skip
    findings, entries = Findings(store), {entry.path: entry for entry in manifest.files}
    if uuid_of(text, manifest.uuid) != manifest.uuid:
        findings.problem("manifest uuid", MANIFEST_NAME, uuid_of(text, manifest.uuid), manifest.uuid)
    _files(findings, entries)
    tables = manifest.all_tables.values()
    margin = margin_for(max((table.row_bytes for table in tables), default=0))
    with Blocks(findings, entries, margin, access, progress) as blocks:
        blocks.total_bytes = sum(entries[path].bytes for path in findings.readable)
        chunks = {table.chunk_path(k) for table in tables for k in range(table.layout.chunks)}
        for path in sorted(findings.readable - chunks):
            blocks.digest(path)
        for array in manifest.arrays.values():
            scrub_metadata(findings, entries, array.path, array.shape, array.shape, array.dtype)
        for table in tables:
            scrub_table(findings, blocks, entries, table)
        for graph in manifest.graphs.values():
            for array in () if graph.hubs is None else (graph.hubs.rows, graph.hubs.offsets):
                scrub_metadata(findings, entries, array.path, array.shape, array.shape, array.dtype)
            rows = (manifest.tables[name].rows for name in (graph.table, graph.table_of_sources))
            scrub_graph(findings, graph, *rows)
        for name in manifest.featureless:
            scrub_featureless(findings, manifest.tables[name])
        for keys in manifest.keys.values():
            scrub_keys(findings, keys)
        if manifest.family is not None:
            scrub_whole_lists(findings, entries, manifest.family)
        unlisted = _unlisted(findings, entries, manifest.generation)
        return VerifyReport(
            path=str(store), uuid=manifest.uuid, generation=manifest.generation, files=len(findings.readable),
            bytes=blocks.done_bytes, pages=findings.pages, access=blocks.access,
            ok=findings.problem_count == 0, problem_count=findings.problem_count,
            problems=tuple(findings.problems), unlisted_count=len(unlisted),
            unlisted=listed(unlisted),
        )  # fmt: skip


def _files(findings: Findings, entries: dict[str, FileEntry]) -> None:
    """Kind and size of every listed file."""
    store = findings.store
    real = os.path.realpath(store)
    straight: dict[str, bool] = {}
    for path, entry in entries.items():
        folder = path.rpartition("/")[0]
        if folder not in straight:
            straight[folder] = os.path.realpath(store / folder) == os.path.join(real, folder)
        try:
            status = os.lstat(store / path)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            findings.problem("missing file", path, f"a file of {entry.bytes:,} bytes", why)
            continue
        if not straight[folder]:
            findings.problem("file kind", path, "a file inside the store", "a path through a symbolic link")
        elif not stat.S_ISREG(status.st_mode):
            findings.problem("file kind", path, "a regular file", "a link, directory, or device")
        elif status.st_size != entry.bytes:
            findings.problem("file size", path, f"{entry.bytes:,} bytes", f"{status.st_size:,} bytes")
        else:
            findings.readable.add(path)


def _unlisted(findings: Findings, entries: dict[str, FileEntry], generation: str) -> list[str]:
    """Names of files that the manifest does not list, sorted."""
    store = findings.store

    def unlistable(error: OSError) -> None:
        folder = os.path.relpath(error.filename or store, store)
        if error.errno != errno.ENOENT:  # what is not there is told of by its files
            why = os.strerror(error.errno or 0)
            findings.problem("unreadable directory", folder, "a directory that can be listed", why)

    with asking(store, "list"):
        found = [name for name in os.listdir(store) if not _OWN_NAMES.fullmatch(name)]
    for folder, folders, files in os.walk(store / generation, onerror=unlistable):
        files += [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [os.path.relpath(os.path.join(folder, name), store) for name in files]
    return sorted(set(found) - entries.keys())
