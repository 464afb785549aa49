"""``featstore gc``: remove what no manifest and no reader refers to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from featstore_cli.options import json_option, settings, shared_options
from featstore_cli.output import print_json, show

if TYPE_CHECKING:
    from featstore.manifest import Manifest


@click.command("gc")
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--unfinished",
    is_flag=True,
    help="Remove unfinished packs and recordings, too; they can then no longer be resumed.",
)
@click.option("--stale", is_flag=True, help="Remove traces compiled for an earlier state of the store, too.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be.")
@json_option
@shared_options
def command(store: Path, unfinished: bool, stale: bool, dry_run: bool, as_json: bool) -> None:
    """Remove old generations of STORE and of the traces compiled for it, and what killed packs have left.

    What a reader has open stays. So does an unfinished pack, because `featstore pack --resume` can go on with it, and a
    compiled trace that has become stale, because the state of the store that it was made for may come back.
    """
    from featstore.errors import IncompleteStoreError
    from featstore.packing.generations import current, names, writer_lock
    from featstore.units import format_bytes

    store = store.absolute()
    if not store.is_dir() or (current(store) is None and not names(store)):
        what = (
            "is not a featstore store"
            if store.is_dir()
            else ("is a file, not a store" if store.exists() else "is not there")
        )
        raise IncompleteStoreError(f"{store} {what}: nothing to collect")
    collecting = _Collecting(store, unfinished, stale, dry_run)
    with writer_lock(store):
        collecting.run()
    removed, kept = collecting.removed, collecting.kept
    total = sum(removed.values())
    if as_json:
        data = {
            "store": str(store),
            "dry_run": dry_run,
            "removed": _listed(removed),
            "bytes": total,
            "stale": _listed(kept),
        }
        print_json("featstore.gc/1", data)
    elif not settings().quiet:
        verb = "would remove" if dry_run else "removed"
        for name, size in removed.items():
            show(f"{verb} {name} ({format_bytes(size)})")
        for name, size in kept.items():
            show(f"{name} ({format_bytes(size)}) was compiled for another state of the store; --stale removes it")
        many = f"{verb} {len(removed)} of {store}'s files and directories, {format_bytes(total)}"
        show(many if removed else "nothing to remove")


def _listed(sizes: dict[str, int]) -> list[dict[str, str | int]]:
    return [{"path": name, "bytes": size} for name, size in sizes.items()]


class _Collecting:
    """What was removed, and stale compiled traces that were kept: bytes, by path relative to the store."""

    def __init__(self, store: Path, unfinished: bool, stale: bool, dry_run: bool) -> None:
        from featstore.disk import Disk

        self.store, self.unfinished, self.stale, self.dry_run = store, unfinished, stale, dry_run
        self.disk = Disk()
        self.removed: dict[str, int] = {}
        self.kept: dict[str, int] = {}

    def run(self) -> None:
        from featstore.errors import StoreLockedError
        from featstore.packing.generations import current, writer_lock

        base = current(self.store)
        self._generations(self.store)
        packs = self.store / "packs"
        for path in sorted(packs.iterdir()) if packs.is_dir() else ():
            if not path.is_dir() or path.is_symlink():
                continue
            try:
                with writer_lock(path):
                    self._pack(path, base)
            except StoreLockedError:
                continue  # it is being written

    def _generations(self, store: Path) -> None:
        """Old generations of a store. The caller holds its writer lock."""
        from featstore.packing.generations import collect

        sizes = {path: _bytes(path) for path in collect(store, self.disk, unfinished=self.unfinished, dry_run=True)}
        gone = list(sizes) if self.dry_run else collect(store, self.disk, unfinished=self.unfinished)
        self.removed |= {str(path.relative_to(self.store)): sizes.get(path, 0) for path in gone}

    def _pack(self, path: Path, base: Manifest | None) -> None:
        """One directory of packs/, whose writer lock is held."""
        from featstore.packing.generations import current, names, remove_store

        if path.suffix == ".trace":  # of featstore.train_loader, which removes it when it has compiled it
            if self.unfinished:
                self._whole(path)
            return
        size, compiled = _bytes(path), current(path)
        if compiled is not None and base is not None and compiled.compiled and compiled.compiled.base_uuid != base.uuid:
            name = str(path.relative_to(self.store))
            if self.stale and remove_store(path, self.disk, dry_run=self.dry_run):
                self.removed[name] = size
                return
            self.kept[name] = size
        if path.suffix == ".forecast" or (compiled is None and not names(path)):
            self._whole(path)  # a dry run that was killed, or a pack that never began
            return
        self._generations(path)
        if compiled is None and not names(path) and not self.dry_run:
            self.disk.rmtree(path)

    def _whole(self, path: Path) -> None:
        self.removed[str(path.relative_to(self.store))] = _bytes(path)
        if not self.dry_run:
            self.disk.rmtree(path)


def _bytes(path: Path) -> int:
    """Bytes of a file or of all files below a directory."""
    if path.is_dir() and not path.is_symlink():
        return sum(p.lstat().st_size for p in path.rglob("*") if not p.is_dir())
    return path.lstat().st_size
