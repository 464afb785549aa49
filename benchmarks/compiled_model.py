"""The model that ``compiled.py`` trains: two layers of GraphSAGE with mean aggregation, as wide as DiskGNN
has it, and a clock.

Edges come grouped by target, so they are a CSR matrix as they are, and a mean over neighbours is a product
with it that needs no memory for messages: beside a tenth of the features there is no room for them.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
from sage import Sage
from torch import Tensor, nn

HIDDEN = 256

# torch says once that its CSR matrices are new; what is used of them here works.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def mean_by_product(h: Tensor, row: Tensor, col: Tensor, targets: int) -> Tensor:
    """float32 [targets, columns of h]: for each target the mean of its neighbours' rows of ``h``. ``row``,
    ``col``: int32."""
    degree = torch.bincount(col, minlength=targets)
    starts = torch.zeros(targets + 1, dtype=torch.int32)
    torch.cumsum(degree, 0, dtype=torch.int32, out=starts[1:])
    share = (1.0 / degree)[col.long()]
    return torch.sparse_csr_tensor(starts, row, share, size=(targets, len(h)), check_invariants=False) @ h


class Training:
    """A model, its optimiser and its clock. ``labels``: uint8, by node id."""

    def __init__(self, columns: int, labels: Any) -> None:
        torch.manual_seed(0)
        self.model = Sage(columns, HIDDEN, mean_by_product)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=0.003)
        self.labels = labels
        self.seconds = 0.0
        self.losses: list[float] = []

    def step(self, x: Any, sample: dict[str, Any]) -> None:
        """One step on a mini-batch: the rows of its nodes, and its sample (see
        :func:`compiled_data.pairs`)."""
        begin = time.perf_counter()
        y = torch.from_numpy(self.labels[sample["seeds"]].astype(np.int64))
        row, col = torch.from_numpy(sample["row"]), torch.from_numpy(sample["col"])
        out = self.model(torch.from_numpy(x), row, col, sample["nodes"], sample["edges"])
        loss = nn.functional.cross_entropy(out, y)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - begin
