"""``torch.index_select``: rows that are all in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def available() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


class IndexSelect:
    """Rows of a matrix in memory; the tensor shares its memory."""

    def __init__(self, rows: NDArray[Any]) -> None:
        import torch

        self._torch = torch
        self._rows = torch.from_numpy(rows)
        self.threads = torch.get_num_threads()

    def read(self, positions: NDArray[np.int64], out: NDArray[Any]) -> None:
        """out[i] = rows[positions[i]]."""
        torch = self._torch
        torch.index_select(self._rows, 0, torch.from_numpy(positions), out=torch.from_numpy(out))
