"""The model that benchmarks of training in little memory train: two layers of GraphSAGE with mean
aggregation.

Those benchmarks differ in how they take the mean over neighbours, because it is what costs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from graphs import CLASSES
from torch import Tensor, nn


class Sage(nn.Module):
    """``mean(h, row, col, targets)``: for each of the first ``targets`` nodes the mean of its neighbours'
    rows of ``h``."""

    def __init__(
        self, inputs: int, hidden: int, mean: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    ) -> None:
        super().__init__()
        widths = [inputs, hidden, CLASSES]
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.other = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        self.mean = mean

    def forward(
        self, h: Tensor, row: Tensor, col: Tensor, nodes: Sequence[int], edges: Sequence[int]
    ) -> Tensor:
        """Logits of the seeds, from the rows of all nodes of a mini-batch, its edges, and how many a hop has
        of each."""
        for depth in range(2):
            targets, count = sum(nodes[: 2 - depth]), sum(edges[: 2 - depth])
            h = self.own[depth](h[:targets]) + self.other[depth](
                self.mean(h, row[:count], col[:count], targets)
            )
            h = h.relu() if depth == 0 else h
        return h
