"""The models of ``mega_accuracy.py``: two layers of PyG's SAGEConv, GATConv or GINConv, for mini-batches and
for a whole graph.

Edges of a mini-batch come grouped by target, so they are a CSR matrix as they are: SAGE and GIN multiply by
it, which needs no memory for messages, and its values weigh them. GAT takes plain edges in training; for the
whole graph its attention is computed edge by edge and applied as one such matrix for each head, which gives
what the layer itself would (:func:`check_attention` holds them against each other) in a fiftieth of the
memory.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.nn import GATConv, GINConv, SAGEConv
from torch_geometric.utils import softmax

from featstore.sampling.neighbors import NeighborSampler

MODELS = ("SAGE", "GAT", "GIN")
HEADS = 4
DROPOUT = 0.5

# torch says once that its CSR matrices are new; what is used of them here works.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # made of a sampler's output, which is checked


@dataclass(frozen=True)
class Edges:
    """Edges into ``targets`` nodes, the first of ``sources``; grouped by target.

    ``row`` and ``col``: int64 [k], positions of each edge's source and target. ``weight``: float32 [k] or
    None.
    """

    row: NDArray[np.int64]
    col: NDArray[np.int64]
    targets: int
    sources: int
    weight: NDArray[np.float32] | None = None

    def csr(self) -> torch.Tensor:
        """Targets by sources, with the weights, or ones, as values."""
        ends = np.cumsum(np.bincount(self.col, minlength=self.targets))
        values = torch.ones(len(self.row)) if self.weight is None else torch.from_numpy(self.weight)
        starts = torch.from_numpy(np.concatenate([[0], ends]))
        return torch.sparse_csr_tensor(
            starts, torch.from_numpy(self.row), values, size=(self.targets, self.sources)
        )

    def pairs(self) -> torch.Tensor:
        """int64 [2, k], as PyG has it."""
        return torch.from_numpy(np.stack([self.row, self.col]))

    def __len__(self) -> int:
        return len(self.row)


class Net(torch.nn.Module):
    """Two layers of a kind, with dropout between them; GIN has a linear layer on top, as its authors have."""

    def __init__(self, kind: str, columns: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.kind = kind
        self.head: torch.nn.Module = torch.nn.Identity()
        if kind == "SAGE":
            layers = [SAGEConv(columns, hidden, aggr="mean"), SAGEConv(hidden, classes, aggr="mean")]
        elif kind == "GAT":
            layers = [GATConv(columns, hidden // HEADS, heads=HEADS), GATConv(hidden, classes, heads=1)]
        else:
            layers = [GINConv(_perceptron(columns, hidden)), GINConv(_perceptron(hidden, hidden))]
            self.head = torch.nn.Linear(hidden, classes)
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, hops: list[Edges]) -> torch.Tensor:
        """Logits [targets of the last hop, classes]. ``hops``: the edges for each layer, the first layer's
        first."""
        for depth, (layer, edges) in enumerate(zip(self.layers, hops, strict=True)):
            x = layer((x, x[: edges.targets]), edges.pairs() if self.kind == "GAT" else edges.csr())
            x = self._between(x) if depth + 1 < len(hops) else x
        out: torch.Tensor = self.head(self._between(x)) if self.kind == "GIN" else x
        return out

    def _between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.relu(), DROPOUT, self.training)


def _perceptron(columns: int, hidden: int) -> torch.nn.Sequential:
    from torch.nn import BatchNorm1d, Linear, ReLU

    return torch.nn.Sequential(Linear(columns, hidden), BatchNorm1d(hidden), ReLU(), Linear(hidden, hidden))


class WholeGraph:
    """The whole graph in memory, to measure accuracy on: the same for all that is compared.

    SAGE and GAT see all neighbours. GIN adds them up, and a sum over thousands is nothing that it met in
    training, so it sees as many as there, drawn once (HierBatching evaluates it likewise).
    """

    def __init__(self, kind: str, indptr: NDArray[np.int64], indices: NDArray[np.int32], fanout: int) -> None:
        nodes = len(indptr) - 1
        row, col = indices.astype(np.int64), np.repeat(np.arange(nodes), np.diff(indptr))
        if kind == "GIN":
            found = NeighborSampler(indptr, indices, [fanout]).sample(np.arange(nodes))
            row, col = found.row, found.col
        elif kind == "GAT":  # which gives each node an edge to itself
            row, col = np.concatenate([row, np.arange(nodes)]), np.concatenate([col, np.arange(nodes)])
            sort = np.argsort(col, kind="stable")
            row, col = row[sort], col[sort]
        self.edges = Edges(row, col, nodes, nodes)
        self._csr = self.edges.csr()

    @torch.no_grad()
    def classes(self, net: Net, x: torch.Tensor) -> torch.Tensor:
        """The class that ``net`` gives each node, int64 [nodes]."""
        net.eval()
        for depth, layer in enumerate(net.layers):
            x = self._attend(layer, x) if net.kind == "GAT" else layer((x, x), self._csr)
            x = net._between(x) if depth + 1 < len(net.layers) or net.kind == "GIN" else x
        found: torch.Tensor = net.head(x).argmax(1)
        return found

    def _attend(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        nodes, row, col = len(x), torch.from_numpy(self.edges.row), torch.from_numpy(self.edges.col)
        h = layer.lin(x).view(nodes, layer.heads, layer.out_channels)
        scores = (h * layer.att_src).sum(-1)[row] + (h * layer.att_dst).sum(-1)[col]
        scores = softmax(torch.nn.functional.leaky_relu(scores, layer.negative_slope), col, num_nodes=nodes)
        heads = []
        for head in range(layer.heads):
            matrix = torch.sparse_csr_tensor(
                self._csr.crow_indices(),
                self._csr.col_indices(),
                scores[:, head].contiguous(),
                size=(nodes, nodes),
            )
            heads.append(matrix @ h[:, head].contiguous())
        out: torch.Tensor = torch.cat(heads, 1) + layer.bias
        return out


def check_attention() -> None:
    """Raise AssertionError unless GAT on a whole graph gives what PyG's layers give."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    nodes = 60
    graph = rng.random((nodes, nodes)) < 0.1
    np.fill_diagonal(graph, False)
    col, row = np.nonzero(graph)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(col, minlength=nodes))])
    x, net = torch.rand(nodes, 7), Net("GAT", 7, 8, 5).eval()
    whole = WholeGraph("GAT", indptr, row.astype(np.int32), 10)
    with torch.no_grad():
        for layer, given in zip(net.layers, (x, torch.rand(nodes, 8)), strict=True):
            expected = layer((given, given), Edges(row, col, nodes, nodes).pairs())
            torch.testing.assert_close(whole._attend(layer, given), expected)
