"""featstore: a storage engine for graph features on SSD.

``pack`` lays features out once in a chunked, checksummed format; ``open`` and ``Store.reader`` read rows at the speed of the
device in a fixed amount of memory. Importing this package loads neither numba nor torch nor zarr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featstore.compiled.build import compile_trace
    from featstore.online.loader import OnlineLoader
    from featstore.online.orders import PartitionOrder
    from featstore.online.proximity import ProximityOrder
    from featstore.online.shared import SharedBuffer
    from featstore.packing.packing import pack
    from featstore.reader import Reader
    from featstore.report import Plan, ReaderStats
    from featstore.request import Request
    from featstore.scrub import verify
    from featstore.store import Store, Table
    from featstore.store import Store as open
    from featstore.trace import Trace
    from featstore.training import train_loader

__version__ = "0.1.0"

_WHERE = {
    "open": ("featstore.store", "Store"),
    "SharedBuffer": ("featstore.online.shared", "SharedBuffer"),
    "Store": ("featstore.store", "Store"),
    "Table": ("featstore.store", "Table"),
    "OnlineLoader": ("featstore.online.loader", "OnlineLoader"),
    "PartitionOrder": ("featstore.online.orders", "PartitionOrder"),
    "ProximityOrder": ("featstore.online.proximity", "ProximityOrder"),
    "Reader": ("featstore.reader", "Reader"),
    "Request": ("featstore.request", "Request"),
    "Plan": ("featstore.report", "Plan"),
    "ReaderStats": ("featstore.report", "ReaderStats"),
    "compile_trace": ("featstore.compiled.build", "compile_trace"),
    "pack": ("featstore.packing.packing", "pack"),
    "train_loader": ("featstore.training", "train_loader"),
    "verify": ("featstore.scrub", "verify"),
    "Trace": ("featstore.trace", "Trace"),
}

__all__ = [
    "OnlineLoader", "PartitionOrder", "Plan", "ProximityOrder", "Reader", "ReaderStats", "Request", "SharedBuffer", "Store", "Table",
    "Trace", "__version__", "compile_trace", "open", "pack", "train_loader", "verify",
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
