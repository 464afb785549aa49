"""A mini-batch with the rows of its nodes, the same under every way to train."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from featstore.arguments import need_package
from featstore.base.modules import loaded
from featstore.errors import SourceError
from featstore.sampling import dgl_graphs
from featstore.sampling.minibatch import OF_LINKS

_ENDS = "edge_label_index", "src_index", "dst_pos_index"  # of links
_OWN = ("index", "n_id", "x", "sample", "_edges", "told_ids")


class Batch:
    """What a training loop gets, with PyG's names.

    Attributes:
        index: its number in the epoch.
        n_id: node ids, integers [m], as the sampler ordered them: the seeds first. Dictionaries by type where
            there are several.
        x: their rows, ``[m, *row shape]``, an array or a tensor; dictionaries by type where there are
            several.
        sample: the sampler's own mini-batch.

        edge_attr: rows of edges, where the loader was told which table, ``edge_table=``.

    Arrays that were asked for, ``attach=``, are here by their names. Everything else is the sampler's:
    ``row`` and ``col`` or ``edge_index``, ``batch_size``, ``num_sampled_nodes``, ``num_sampled_edges``, and
    the user's own fields, by their names. Raises AttributeError for what the sampler's mini-batch does not
    have.
    """

    edge_attr: Any

    def __init__(self, index: int, n_id: Any, x: Any, sample: Any = None, *, told: bool = False) -> None:
        self.index, self.n_id, self.x, self.sample = index, n_id, x, sample
        self._edges: Any = None
        self.told_ids = told  # whoever brought the mini-batch has said n_id, and not its sample

    # What PyG calls so, of samplers that call it otherwise.

    @property
    def row(self) -> Any:
        """int64 [k], of each edge the position of its source in ``n_id``."""
        found = self._of_sample("row")
        return self._of_sample("edge_index", need=True)[0] if found is None else found

    @property
    def col(self) -> Any:
        """int64 [k], of each edge the position of its target in ``n_id``."""
        found = self._of_sample("col")
        return self._of_sample("edge_index", need=True)[1] if found is None else found

    @property
    def edge_index(self) -> Any:
        """int64 [2, k]: ``row`` and ``col``; a tensor where they are tensors, or where ``x`` is one. By edge
        type where there are several."""
        found = self._of_sample("edge_index") if self._edges is None else self._edges
        if found is not None:
            return found
        row, col = self._of_sample("row", need=True), self._of_sample("col", need=True)
        if isinstance(row, Mapping):
            return {edge_type: self._stacked(row[edge_type], col[edge_type]) for edge_type in row}
        return self._stacked(row, col)

    def _stacked(self, row: Any, col: Any) -> Any:
        both, torch = np.stack([row, col]), loaded("torch", "Tensor")
        if torch is not None and isinstance(_first(self.x), torch.Tensor):
            return torch.from_numpy(both).to(_first(self.x).device, non_blocking=True)
        return both

    def bring_edges(self) -> None:
        """Have ``edge_index`` where ``x`` is, now."""
        if self._of_sample("row") is not None:
            self._edges = self.edge_index

    @property
    def batch_size(self) -> int:
        """Number of seeds, which are the first of ``n_id``."""
        found = self._of_sample("batch_size")
        if found is None:
            counts = self.num_sampled_nodes
            by_type = counts.values() if isinstance(counts, Mapping) else [counts]
            found = sum(of[0] for of in by_type)  # seeds are of one type
        return int(found)

    @property
    def num_sampled_nodes(self) -> Any:
        """New nodes of each hop, the seeds as hop 0."""
        return self._of_sample("num_sampled_nodes", need=True)

    @property
    def num_sampled_edges(self) -> Any:
        """Edges of each hop."""
        return self._of_sample("num_sampled_edges", need=True)

    @property
    def e_id(self) -> Any:
        """The user's numbers of the edges, where the sampler's mini-batch has them."""
        return self._of_sample("e_id", need=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:  # while it is copied
            raise AttributeError(name)
        return self._of_sample(name, need=True)

    def _of_sample(self, name: str, need: bool = False) -> Any:
        sample = self.sample
        found = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
        if found is None and need:
            if name == "e_id" and self._of_sample("edge_id") is not None:
                raise AttributeError(
                    "this mini-batch has no e_id, the user's edge numbers: its edge_id counts edges in the "
                    "sampler's own order. A store has them where it was packed with edge_ids=True"
                )
            if name == "edge_attr":
                raise AttributeError(
                    "this mini-batch has no 'edge_attr': say which table of the store has the rows of edges, "
                    "store.loader(..., edge_table=)"
                )
            raise AttributeError(
                f"this mini-batch has no {name!r}: it has index, n_id, x and what the sampler's "
                f"{type(sample).__name__} has"
            )
        return found

    def pyg(self) -> Any:
        """PyG's object: the sampler's own where it is one, with the rows as ``x``; else a ``Data`` with x,
        n_id, edge_index, batch_size, num_sampled_nodes, num_sampled_edges, e_id where edges have numbers, and
        edge_weight where they have weights; a ``HeteroData`` where there are edge types; all of it on the
        device of the rows. Raises MissingPackageError without PyG; SourceError for several types of nodes
        without types of edges.
        """
        if of_pyg(self.sample):
            return self.sample
        need_package("torch_geometric", "pyg", "batch.pyg()")
        import torch

        made = self._hetero() if isinstance(self.n_id, Mapping) else self._homogeneous()
        like = _first(self.x)
        on_host = not isinstance(like, torch.Tensor) or like.device.type == "cpu"
        return made if on_host else made.to(like.device, non_blocking=True)

    def _homogeneous(self) -> Any:
        """The mini-batch as a ``Data``, with PyG's names."""
        from torch_geometric.data import Data

        self._check_places(self.n_id, self._own_nodes())
        data = Data(
            x=_tensor(self.x, "x"), edge_index=_tensor(self.edge_index, "edge_index"),
            n_id=_tensor(self.n_id, "n_id"), batch_size=self.batch_size,
            num_sampled_nodes=list(self.num_sampled_nodes),
            num_sampled_edges=list(self.num_sampled_edges) or None,
        )  # fmt: skip
        weight = self._of_sample("weight")
        if weight is not None:
            data.edge_weight = _tensor(weight, "edge_weight")
        for name in ("batch", *OF_LINKS):
            if self._of_sample(name) is not None:
                data[name] = _tensor(self._of_sample(name), name)
        numbers = self._of_sample("e_id")
        if numbers is not None:
            data.e_id = _tensor(numbers, "e_id")
        for name, value in vars(self).items():
            if name not in _OWN:
                data[name] = _tensor(value, name) if isinstance(value, np.ndarray) else value
        return data

    def _hetero(self) -> Any:
        """The mini-batch as a ``HeteroData``, with PyG's names."""
        from torch_geometric.data import HeteroData

        if not isinstance(self._of_sample("row"), Mapping):
            raise SourceError(
                "a mini-batch of several types of nodes becomes a HeteroData where its sampler knows types "
                "of edges, as the store's own does, or made one"
            )
        data, counts = HeteroData(), self.num_sampled_nodes
        known = self._own_nodes()
        for node_type, ids in self.n_id.items():
            self._check_places(ids, known.get(node_type) if isinstance(known, Mapping) else None)
            store = data[node_type]
            store.n_id, store.num_nodes = _tensor(ids, "n_id"), len(ids)
            store.num_sampled_nodes = list(counts[node_type])
            if node_type in self.x:
                store.x = _tensor(self.x[node_type], "x")
            if counts[node_type][0]:
                store.batch_size = counts[node_type][0]
            links = any(self._of_sample(name) is not None for name in _ENDS)  # whose type is not known here
            for name in ("input_id", "seed_time") if counts[node_type][0] and not links else ():
                if self._of_sample(name) is not None:
                    store[name] = _tensor(self._of_sample(name), name)
        parts = {name: self._of_sample(name) for name in ("e_id", "batch")} | {"edge_index": self.edge_index}
        parts |= {"num_sampled_edges": self.num_sampled_edges, "edge_weight": self._of_sample("weight")}
        given = {name: value for name, value in vars(self).items() if name not in _OWN}
        for name, by_type in (parts | given).items():
            for key, value in (by_type or {}).items():
                listed = isinstance(value, tuple)
                data[key][name] = list(value) if listed else _tensor(value, name)
        return data

    def _own_nodes(self) -> Any:
        """The nodes that the store's sampler drew, which stay as they are; None of another's mini-batch,
        whose memory may be used again."""
        return None if isinstance(self.sample, Mapping) else getattr(self.sample, "node", None)

    def _check_places(self, ids: Any, sampled: Any) -> None:
        """Raise SourceError where edges speak of places among other nodes than the rows are of."""
        if sampled is not None and not np.array_equal(_on_host(ids), _on_host(sampled)):
            raise SourceError(
                "nodes= gave this mini-batch other rows than its sampler's nodes, of whose places edge_index "
                "speaks: put rows and edges together yourself, from batch.n_id and batch.sample"
            )

    def __repr__(self) -> str:
        nodes = (
            {t: len(i) for t, i in self.n_id.items()} if isinstance(self.n_id, Mapping) else len(self.n_id)
        )
        return f"<Batch {self.index}: {nodes} nodes>"


def _on_host(values: Any) -> Any:
    return values.cpu().numpy() if hasattr(values, "cpu") else np.asarray(values)


def _tensor(values: Any, name: str) -> Any:
    """An array, or a list of numbers, as a tensor; what is one stays as it is. Raises ArgumentError."""
    if isinstance(values, list | tuple):
        values = np.asarray(values)
    if not isinstance(values, np.ndarray):
        return values
    from featstore.base.tensors import as_tensor

    return as_tensor(
        values, f"PyG's objects hold tensors, and {name!r} can be none: use the mini-batch without pyg()"
    )


def of_pyg(sample: Any) -> bool:
    """Whether a sampler's mini-batch is an object of PyG's."""
    return type(sample).__module__.startswith("torch_geometric.")


def wants_tensors(tensors: bool | None, sample: Any, device: Any = None) -> bool:
    """Whether rows are handed out as tensors: as was said, or by default where the sampler's mini-batch is
    PyG's or DGL's, or there is a device."""
    return device is not None or of_pyg(sample) or dgl_graphs.is_named(sample) if tensors is None else tensors


def filled(batch: Batch, x: dict[str, Any], device: Any) -> Any:
    """What a training loop gets, with the sampler's part of it on the device, too: PyG's object with the rows
    ``x`` by table, where the sampler gave one, else the ``batch``."""
    if of_pyg(batch.sample):
        from featstore.loaders.deliver import fill_pyg

        return fill_pyg(copy.copy(batch.sample), x, device)  # what was given stays as it is
    if dgl_graphs.is_named(batch.sample):
        if device is not None:
            batch.sample = dgl_graphs.on_device(batch.sample, device)
        batch.n_id = batch.sample["input_nodes"]
    elif device is not None:
        batch.bring_edges()
    return batch


def device_tensors(made: Any) -> Iterator[Any]:
    """Tensors and graphs on accelerators, of a mini-batch or what else holds some."""
    if hasattr(made, "record_stream") and hasattr(made, "device"):  # of torch, or a graph of DGL's
        if made.device.type != "cpu":
            yield made
    elif isinstance(made, Mapping):
        yield from device_tensors(list(made.values()))
    elif isinstance(made, list | tuple):
        for one in made:
            yield from device_tensors(one)
    elif isinstance(made, Batch):
        yield from device_tensors(list(vars(made).values()))
    elif of_pyg(made):
        yield from device_tensors([store.to_dict() for store in made.stores])


def ids_of(sample: Any) -> Any:
    """The node ids that a sampler's mini-batch knows, as :mod:`featstore.sampling.minibatch` finds them; None
    where it has none."""
    for name in ("n_id", "node", "input_nodes"):
        found = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
        if found is not None:
            return found
    return None


def check_numbered(numbers: Any, what: str, edge_type: Any) -> None:
    """Raise SourceError where edges of a type have no number, and so no row."""
    if numbers is not None and len(numbers) and numbers.min() < 0:
        raise SourceError(
            f"{what}: these mini-batches have reverses of another relation's edges as edges of {edge_type} "
            "(subgraph_type='bidirectional'), which have no number and no row: leave it out"
        )


def device_of_rows(batch: Batch) -> Any:
    """The device of a mini-batch's rows, which are tensors."""
    rows = batch.edge_attr if isinstance(batch.x, Mapping) and not batch.x else batch.x
    return _first(rows).device


def _first(rows: Any) -> Any:
    return next(iter(rows.values()), None) if isinstance(rows, Mapping) else rows


def attached_to(batch: Batch) -> dict[str, Any]:
    """Rows of edges, and arrays that were asked for, by their names."""
    return {name: one for name, one in vars(batch).items() if name not in _OWN}
