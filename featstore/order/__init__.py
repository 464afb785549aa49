"""Order: which row comes after which on disk.

Sampling asks for nodes that are near each other in the graph, and a disk reads neighbouring rows in one go;
so rows that are asked for together should stand together. This package turns a graph into such an
:class:`Order`:

- :mod:`featstore.order.permutation`: the :class:`Order` itself, and the simple ones (as given, permutation,
  degree);
- :mod:`featstore.order.orders`: the choice;
- :mod:`featstore.order.metis`: METIS, the best partitions for graphs that fit in memory several times over;
- :mod:`featstore.order.multilevel`: as good in a fraction of the memory, from METIS on a small graph of
  clusters, which :mod:`featstore.order.propagate` finds and :mod:`featstore.order.coarsen` contracts;
- :mod:`featstore.order.ldg`: restreamed, annealed LDG, nearly as good in four bytes a node;
- :mod:`featstore.order.blocks`: BGL's blocks, grown by breadth-first search, with training nodes balanced;
- :mod:`featstore.order.parts`: from part numbers to rows;
- :mod:`featstore.order.stream`: reading a graph in sequential blocks.

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featstore.order.blocks import bfs_memory_bytes, bfs_partition
    from featstore.order.ldg import ldg_memory_bytes, ldg_partition
    from featstore.order.metis import metis_memory_bytes, metis_partition
    from featstore.order.multilevel import multilevel_memory_bytes, multilevel_partition
    from featstore.order.orders import default_partitions, make_order
    from featstore.order.parts import order_of_parts
    from featstore.order.permutation import Order, degree_order, given_order, permutation_order
    from featstore.order.stream import GraphLike, degree_counts, edge_cut

__all__ = [
    "GraphLike",
    "Order",
    "bfs_memory_bytes",
    "bfs_partition",
    "default_partitions",
    "degree_counts",
    "degree_order",
    "edge_cut",
    "given_order",
    "ldg_memory_bytes",
    "ldg_partition",
    "make_order",
    "metis_memory_bytes",
    "metis_partition",
    "multilevel_memory_bytes",
    "multilevel_partition",
    "order_of_parts",
    "permutation_order",
]

_MODULE_OF = {
    "GraphLike": "stream",
    "bfs_memory_bytes": "blocks",
    "bfs_partition": "blocks",
    "degree_counts": "stream",
    "edge_cut": "stream",
    "ldg_memory_bytes": "ldg",
    "ldg_partition": "ldg",
    "metis_memory_bytes": "metis",
    "metis_partition": "metis",
    "multilevel_memory_bytes": "multilevel",
    "multilevel_partition": "multilevel",
    "order_of_parts": "parts",
    "Order": "permutation",
    "degree_order": "permutation",
    "given_order": "permutation",
    "permutation_order": "permutation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'orders')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
