"""The directory of a split: ``topology``, ``host-0``, ``host-1`` ..., and nothing else.

What stands there and was not made by a split is neither read, written nor removed: then the directory is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from featstore.base.folders import is_folder
from featstore.base.system import asking, is_there
from featstore.base.warning import warn
from featstore.errors import FormatError, IncompleteStoreError, SourceError, StoreExistsError
from featstore.storage.disk import Disk
from featstore.storage.generations import LOCK_NAME, current, names, remove_store, writer_lock
from featstore.storage.journal import Journal
from featstore.storage.manifest import MANIFEST_NAME, TOPOLOGY, FamilyEntry
from featstore.storage.store import OpenStore

REPLACES = "replaces"  # in a journal beside a split: the parts of another that it replaces
_MEMBER = re.compile(r"topology|host-(?:0|[1-9][0-9]{0,4})")


@dataclass(frozen=True)
class Standing:
    """A store of a family as it stands: of which family it is, committed, whether one is unfinished, and the
    uuid of what is committed."""

    family: FamilyEntry | None
    unfinished: bool
    uuid: str = ""


def member_name(host: int) -> str:
    return f"host-{host}"


def check_place(out: Path, store: Path) -> None:
    """Raise SourceError where a split cannot stand: in the store, or where a file is."""
    if out == store or store in out.parents:
        raise SourceError(
            f"out= ({out}) lies inside the store that is split ({store}): give a directory beside it"
        )
    if is_there(out) and not is_folder(out):
        raise SourceError(f"{out} is a file; give the path of a directory to make")


def standing(out: Path) -> dict[str, Standing]:
    """What of a split is in a directory, by name. Raises StoreExistsError for what is none."""
    if not is_there(out):
        return {}
    with asking(out, "list"):
        entries = sorted(path for path in out.iterdir() if path.name != LOCK_NAME)
    foreign = [path.name for path in entries if not (_MEMBER.fullmatch(path.name) and is_folder(path))]
    if foreign:
        more = f" and {len(foreign) - 3:,} more" if len(foreign) > 3 else ""
        raise StoreExistsError(
            f"{out} holds {', '.join(map(repr, foreign[:3]))}{more}, which no split has made, and is left "
            "alone: "
            "give an empty or a new directory"
        )
    return {path.name: found for path in entries if (found := _standing(path)) is not None}


def _standing(path: Path) -> Standing | None:
    """How a directory of a split's name stands; None where nothing is in it."""
    committed, known = current(path), names(path)
    if committed is None:
        with asking(path, "list"):
            others = [p.name for p in path.iterdir() if p.name != LOCK_NAME]
        if known:
            return Standing(None, any((path / f"{name}.journal") in known[name] for name in known))
        if not others:
            return None
        raise _foreign(path, f"it holds {others[0]!r}")
    family = committed.family
    own = path.name == (TOPOLOGY if family is None or family.host is None else member_name(family.host))
    if family is None or not own:
        raise _foreign(path, "its store is another one")
    journals = [n for n in known if n != committed.generation and path / f"{n}.journal" in known[n]]
    return Standing(family, bool(journals), committed.uuid)


def is_complete(found: Mapping[str, Standing]) -> bool:
    """Whether all stores of a split are there, of one family, and none is unfinished."""
    topology = found.get(TOPOLOGY)
    if topology is None or topology.family is None or any(one.unfinished for one in found.values()):
        return False
    names = {TOPOLOGY, *map(member_name, range(topology.family.hosts))}
    return found.keys() == names and not others(found)


def others(found: Mapping[str, Standing]) -> list[str]:
    """The parts of another split than the topology that is finished; all, where none is, as parts are begun
    after it."""
    topology = found.get(TOPOLOGY)
    if topology is None or topology.unfinished:
        return host_parts(found)
    families = {name: found[name].family for name in host_parts(found)}
    return [name for name, one in families.items() if one is not None and one.uuid != topology.uuid]


def host_parts(found: Mapping[str, Standing]) -> list[str]:
    """The hosts' parts."""
    return sorted(name for name in found if name != TOPOLOGY)


def can_go_on(out: Path) -> bool:
    """Whether a split was stopped there that ``resume`` goes on with. Raises what looking at it raises."""
    found, journal = standing(out), journal_there(out, Disk())
    if journal is not None:
        return REPLACES not in journal.state.fingerprint
    return bool(found) and not is_complete(found) and not others(found)


def order_path(out: Path) -> Path:
    """The store of the order, where a split is straight from features."""
    return out.with_name(f"{out.name}.order")


def journal_path(out: Path) -> Path:
    """What the features and that order are made of, until such a split is complete."""
    return out.with_name(f"{out.name}.order.journal")


def journal_there(out: Path, disk: Disk) -> Journal | None:
    """What an unfinished split straight from features is made of. Raises StoreExistsError for a file that
    says something else."""
    path = journal_path(out)
    if not is_there(path):
        return None
    try:
        return Journal.load(disk, path)
    except FormatError as error:
        raise StoreExistsError(
            f"{path} is needed for what the split is made of, and holds something else, which is left alone: "
            f"give another out= ({error})"
        ) from None


def is_order(path: Path) -> bool:
    """Whether a store may be of an order: has checksums of rows alone, and nodes without features."""
    with OpenStore(path) as store:
        return all(
            (table.entry.dtype == "uint32" and not table.row_shape) or name in store.manifest.featureless
            for name, table in store.tables.items()
        )


def remove_order(out: Path, journal: Journal) -> bool:
    """Remove the store of the order and what it is made of; False where it is being read, and stays."""
    path = order_path(out)
    with writer_lock(path):
        gone = remove_store(path, journal.disk) and not is_there(path)
    if gone:
        journal.remove()
    return gone


@contextmanager
def replacing(out: Path, disk: Disk, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Split a store to where a split straight from features may have been stopped. Raises StoreExistsError
    unless that is to be replaced; then its order goes when all parts are there."""
    then = journal_there(out, disk)
    if then is not None and not overwrite:
        raise StoreExistsError(
            f"the split in {out} was begun straight from features, and is unfinished: go on with that"
            f"{'' if resume else ' (--resume)'}, or start anew with --overwrite"
        )
    yield
    path = order_path(out)
    if then is None:
        return
    if is_there(path / MANIFEST_NAME) and not is_order(path):  # somebody has put it there since
        then.remove()
    elif not remove_order(out, then):
        warn(f"{path}, which has the order of the earlier split, is read: remove it")


def _foreign(path: Path, why: str) -> StoreExistsError:
    return StoreExistsError(
        f"{path} was not made by a split ({why}), and is left alone: give an empty or a new directory"
    )


def check_standing(out: Path, found: dict[str, Standing], *, resume: bool, overwrite: bool) -> None:
    """Raise StoreExistsError, IncompleteStoreError where what stands there and what was asked for do not
    fit."""
    if found and not (resume or overwrite):
        raise StoreExistsError(
            f"{out} already holds a split, or a part of one: give another path, go on with --resume where "
            "it is "
            "unfinished, or replace it with --overwrite"
        )
    if resume and not found:
        raise IncompleteStoreError(f"there is nothing to resume in {out}; split without --resume")


def check_finished(
    path: Path, family: FamilyEntry, wanted: FamilyEntry, uuid: str | None, asked: object = None
) -> None:
    """Raise StoreExistsError unless a store that is finished is of the family that is being made, and its
    files are there."""
    of_it = (family.hosts, family.base_uuid, family.uuid, family.host) == (
        wanted.hosts, wanted.base_uuid, uuid, wanted.host,
    )  # fmt: skip
    with OpenStore(path) as store:
        then = store.manifest.provenance.get("split")
    if not of_it or (asked is not None and then != asked):
        raise StoreExistsError(
            f"{path} is finished and of another split (of {family.hosts} hosts, of the store "
            f"{family.base_uuid}, "
            f"with {then}); give the same store and options, or start anew with --overwrite"
        )


def remove_others(out: Path, found: dict[str, Standing], hosts: int, disk: Disk) -> None:
    """Remove the parts of an earlier split of more hosts."""
    for name in found:
        path = out / name
        if name == TOPOLOGY or int(name.partition("-")[2]) < hosts:
            continue
        with writer_lock(path):
            removed = remove_store(path, disk)
        if not removed or is_there(path):
            warn(
                f"{path} is of the earlier split, of more hosts, and stays, because it is being read or "
                "holds "
                "what no split has made: remove it"
            )
