"""The keys of a pack's tables, from what the user gave to the store's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from featstore.errors import SourceError
from featstore.packing.keys.index import KeyIndex, index_keys
from featstore.packing.keys.numbering import number_rows, write_keys
from featstore.packing.keys.sources import KeySource
from featstore.packing.keys.spool import KeySpool
from featstore.packing.keys.translate import Ends
from featstore.packing.progress import PackStages
from featstore.storage.disk import Disk
from featstore.storage.manifest import KeysEntry
from featstore.storage.table_writer import Catalogue

__all__ = ["PackedKeys"]


class PackedKeys:
    """Keys by table, on scratch files in ``folder``, numbered and indexed within ``memory_bytes``. Raises
    SourceError for a key that stands twice, BudgetError, DiskFullError, DeviceError."""

    def __init__(
        self, given: Mapping[str, KeySource], disk: Disk, folder: Path, memory_bytes: int, stages: PackStages
    ) -> None:
        self._spools: dict[str, KeySpool] = {}
        self._indices: dict[str, KeyIndex] = {}
        for name, source in given.items():
            stages.begin("keys", name)
            spool = self._spools[name] = number_rows(source, disk, folder, name, stages.add)
            self._indices[name] = index_keys(spool, memory_bytes)

    @property
    def bytes(self) -> int:
        """What they will take in the store, about."""
        return sum(spool.key_bytes + 24 * len(spool) for spool in self._spools.values())

    def ends(self, sources: str, targets: str) -> Ends | None:
        """The keys at the ends of edges between nodes of two tables; None where neither has any."""
        found = self._spools.get(sources), self._spools.get(targets)
        return None if found == (None, None) else Ends(*found, (sources, targets))

    def check(self, name: str, rows: int) -> None:
        """Raise SourceError unless a table has a key for each of its rows."""
        spool = self._spools.get(name)
        if spool is not None and len(spool) != rows:
            raise SourceError(
                f"table {name!r} has {rows:,} rows, and {spool.source} {len(spool):,} keys; each row has one"
            )

    def write(self, catalogue: Catalogue, generation: str) -> dict[str, KeysEntry]:
        """Write all of them into a generation."""
        return {
            name: write_keys(catalogue, f"{generation}/keys/{name}", spool, self._indices[name])
            for name, spool in self._spools.items()
        }

    def close(self) -> None:
        """Remove the scratch files."""
        for name, spool in self._spools.items():
            spool.close()
            if name in self._indices:
                self._indices[name].close()
