"""``featstore gc``: remove what no manifest and no reader refers to."""

from __future__ import annotations

from pathlib import Path

import click

from featstore_cli.options import json_option, settings, shared_options
from featstore_cli.output import print_json, show


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
    """Remove old generations of STORE and of the traces compiled for it, and what killed packs, loaders and
    savings have left.

    What a reader or a loader has open stays. So does an unfinished pack, because `featstore pack --resume`
    can go on with it, and a compiled trace that has become stale, because the state of the store that it was
    made for may come back. What is not proven to be featstore's stays, and is named; no symbolic link is
    followed.
    """
    from featstore.scrub.collection import Collection
    from featstore.units import format_bytes

    done = Collection(store.absolute(), unfinished=unfinished, stale=stale, dry_run=dry_run)
    total = sum(done.removed.values())
    if as_json:
        data = {
            "store": str(store.absolute()),
            "dry_run": dry_run,
            "removed": _listed(done.removed, "bytes"),
            "bytes": total,
            "stale": _listed(done.stale, "bytes"),
            "held": _listed(done.held, "why"),
            "unproven": _listed(done.unproven, "why"),
        }
        print_json("featstore.gc/1", data)
    elif not settings().quiet:
        verb = "would remove" if dry_run else "removed"
        for name, size in done.removed.items():
            show(f"{verb} {name} ({format_bytes(size)})")
        for name, size in done.stale.items():
            show(
                f"{name} ({format_bytes(size)}) was compiled for another state of the store; --stale "
                "removes it"
            )
        for name, why in (done.held | done.unproven).items():
            show(f"left alone {name}: {why}")
        many = (
            f"{verb} {len(done.removed)} of {store.absolute()}'s files and directories, {format_bytes(total)}"
        )
        show(many if done.removed else "nothing to remove")


def _listed(found: dict[str, int] | dict[str, str], what: str) -> list[dict[str, str | int]]:
    return [{"path": name, what: value} for name, value in found.items()]
