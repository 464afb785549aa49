"""featstore: a storage engine for graph features on SSD.

``pack`` lays features out once in a chunked, checksummed format; ``open`` and ``Store.reader`` read rows at
the speed of the device in a fixed amount of memory. Importing this package loads neither numba nor torch nor
zarr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from featstore._version import __version__

if TYPE_CHECKING:
    from featstore import errors as errors
    from featstore.engine.request import Request
    from featstore.front.compiling import compile_trace
    from featstore.front.exporting import export
    from featstore.front.packing import pack
    from featstore.front.splitting import split, split_features
    from featstore.front.verifying import verify
    from featstore.hosts.massivegnn import MassiveGNN
    from featstore.hosts.tier import Hosts
    from featstore.loaders.batch import Batch
    from featstore.loaders.loader import Loader
    from featstore.reader.reader import Reader
    from featstore.reader.report import Plan, ReaderStats
    from featstore.reader.table_array import TableArray
    from featstore.reader.tiered import TieredReader
    from featstore.sampling.orders import PartitionOrder
    from featstore.sampling.proximity import ProximityOrder
    from featstore.shared.owner import SharedBuffer
    from featstore.shared.tier import Shared
    from featstore.split_store import open_split
    from featstore.store import Store, Table
    from featstore.store import Store as open
    from featstore.tiers.buffer_tier import Buffer
    from featstore.tiers.device_tier import Device
    from featstore.tiers.static_tier import Static
    from featstore.trace.trace import Trace


_WHERE = {
    "open": ("featstore.store", "Store"),
    "open_split": ("featstore.split_store", "open_split"),
    "Hosts": ("featstore.hosts.tier", "Hosts"),
    "MassiveGNN": ("featstore.hosts.massivegnn", "MassiveGNN"),
    "SharedBuffer": ("featstore.shared.owner", "SharedBuffer"),
    "Store": ("featstore.store", "Store"),
    "Table": ("featstore.store", "Table"),
    "Buffer": ("featstore.tiers.buffer_tier", "Buffer"),
    "Device": ("featstore.tiers.device_tier", "Device"),
    "Shared": ("featstore.shared.tier", "Shared"),
    "Static": ("featstore.tiers.static_tier", "Static"),
    "TableArray": ("featstore.reader.table_array", "TableArray"),
    "TieredReader": ("featstore.reader.tiered", "TieredReader"),
    "Batch": ("featstore.loaders.batch", "Batch"),
    "Loader": ("featstore.loaders.loader", "Loader"),
    "PartitionOrder": ("featstore.sampling.orders", "PartitionOrder"),
    "ProximityOrder": ("featstore.sampling.proximity", "ProximityOrder"),
    "Reader": ("featstore.reader.reader", "Reader"),
    "Request": ("featstore.engine.request", "Request"),
    "Plan": ("featstore.reader.report", "Plan"),
    "ReaderStats": ("featstore.reader.report", "ReaderStats"),
    "compile_trace": ("featstore.front.compiling", "compile_trace"),
    "export": ("featstore.front.exporting", "export"),
    "pack": ("featstore.front.packing", "pack"),
    "split": ("featstore.front.splitting", "split"),
    "split_features": ("featstore.front.splitting", "split_features"),
    "verify": ("featstore.front.verifying", "verify"),
    "Trace": ("featstore.trace.trace", "Trace"),
}

__all__ = [
    "Batch", "Buffer", "Device", "Hosts", "Loader", "MassiveGNN", "PartitionOrder", "Plan", "ProximityOrder",
    "Reader", "ReaderStats", "Request", "Shared", "SharedBuffer", "Static", "Store", "Table",
    "TableArray", "TieredReader", "Trace", "__version__", "compile_trace", "export", "open",
    "open_split", "pack", "split", "split_features", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module 'featstore' has no attribute {name!r}") from None
    import importlib

    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
