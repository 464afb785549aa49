"""``featstore gc``: remove what no manifest and no reader refers to."""

from __future__ import annotations

from pathlib import Path

import click

from featstore_cli.options import json_option, settings, shared_options
from featstore_cli.output import print_json, show


@click.command("gc")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--unfinished", is_flag=True, help="Remove an unfinished pack, too; it can then no longer be resumed.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be.")
@json_option
@shared_options
def command(store: Path, unfinished: bool, dry_run: bool, as_json: bool) -> None:
    """Remove old generations of STORE and what killed packs have left.

    What a reader has open stays. So does an unfinished pack, because `featstore pack --resume` can go on with it.
    """
    from featstore.disk import Disk
    from featstore.errors import IncompleteStoreError
    from featstore.packing.generations import collect, current, names, writer_lock
    from featstore.units import format_bytes

    store = store.absolute()
    if not store.is_dir() or (current(store) is None and not names(store)):
        what = (
            "is not a featstore store"
            if store.is_dir()
            else ("is a file, not a store" if store.exists() else "is not there")
        )
        raise IncompleteStoreError(f"{store} {what}: nothing to collect")
    with writer_lock(store):
        sizes = {path: _bytes(path) for path in collect(store, Disk(), unfinished=unfinished, dry_run=True)}
        removed = list(sizes) if dry_run else collect(store, Disk(), unfinished=unfinished)
    paths = {path.name: sizes.get(path, 0) for path in removed}
    total = sum(paths.values())
    if as_json:
        listed = [{"path": name, "bytes": size} for name, size in paths.items()]
        print_json("featstore.gc/1", {"store": str(store), "dry_run": dry_run, "removed": listed, "bytes": total})
    elif not settings().quiet:
        verb = "would remove" if dry_run else "removed"
        for name, size in paths.items():
            show(f"{verb} {name} ({format_bytes(size)})")
        show(
            f"{verb} {len(paths)} of {store}'s files and directories, {format_bytes(total)}"
            if paths
            else "nothing to remove"
        )


def _bytes(path: Path) -> int:
    """Bytes of a file or of all files below a directory."""
    if path.is_dir() and not path.is_symlink():
        return sum(p.lstat().st_size for p in path.rglob("*") if not p.is_dir())
    return path.lstat().st_size
