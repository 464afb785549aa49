"""The shuffling error: how many sequences does a proximity-aware order need, so that training does not
notice?

Stochastic gradient descent wants mini-batches that look like the whole training set; an order that keeps
neighbours together gives mini-batches of few labels instead. BGL (section 3.2.2) measures this by the labels:
the **shuffling error** of an order is the total variation distance between the label distribution of a
mini-batch and that of all training nodes, here its mean over the full mini-batches of an epoch. After Meng et
al. (2019) convergence does not suffer while the error is at most ``sqrt(b * M / n)``, for mini-batches of b
nodes on M trainers and n training nodes.

**A floor.** The labels of b nodes differ from the whole's distribution by chance alone, even in a perfectly
random order, and with small mini-batches or many classes by more than the bound, which no order could then
meet. So the error of random orders is measured, too, and what is asked for is the bound or ``RANDOM_MARGIN``
times that error, whichever is larger. This is an addition to BGL.

**The search** doubles the number of sequences until the error is small enough, and then bisects. It takes for
granted that the error falls as sequences are added, which holds but for noise: the number found is small
enough, and one less is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featstore.base.compilation import njit
from featstore.base.ids import plain_array
from featstore.base.warning import warn
from featstore.errors import SourceError

__all__ = ["LabelTest", "ShufflingSearch", "search_sequences"]

#: An order whose error is at most this many times that of a random one counts as random.
RANDOM_MARGIN = 1.1
_RANDOM_ORDERS = 8


@njit(cache=True, nogil=True)
def batch_errors(classes: Any, order: Any, batch_size: Any, whole: Any, errors: Any) -> None:
    """Total variation distance between the classes of each mini-batch and ``whole``, into ``errors``.

    ``classes``: int64 [n], below ``len(whole)``, by position. ``order``: int64 [n], positions. ``whole``:
    float64 [classes], sums to 1. ``errors``: float64 [mini-batches].
    """
    counts = np.zeros(len(whole), np.int64)
    for batch in range(len(errors)):
        counts[:] = 0
        begin = batch * batch_size
        end = min(begin + batch_size, len(order))
        for place in range(begin, end):
            counts[classes[order[place]]] += 1
        distance = 0.0
        for label in range(len(whole)):
            distance += abs(counts[label] / (end - begin) - whole[label])
        errors[batch] = distance / 2


class LabelTest:
    """Measures orders of the training nodes by their labels.

    ``labels``: integers [nodes], by node id (any integer is a class of its own, -1 too). ``train``: int64
    [n]. ``trainers``: M, those that train at the same time, each on mini-batches of ``batch_size``. Raises
    SourceError.
    """

    def __init__(
        self,
        labels: NDArray[Any],
        train: NDArray[np.int64],
        batch_size: int,
        node_count: int,
        trainers: int = 1,
    ) -> None:
        given = plain_array(labels, "labels")
        if given.shape != (node_count,) or given.dtype.kind not in "biu":
            raise SourceError(
                f"labels must be one integer for each of the {node_count:,} nodes, by node id, not "
                f"{given.dtype} of shape {list(given.shape)}; without a single label per node, pass "
                "sequences= as a number"
            )
        _, classes = np.unique(given[train], return_inverse=True)
        self.classes = classes.astype(np.int64)
        self.whole = np.bincount(self.classes) / len(train)
        self.batch_size = batch_size
        self.bound = math.sqrt(batch_size * trainers / len(train))
        """sqrt(b * M / n): the largest error that leaves convergence as it is (Meng et al., as BGL uses
        it)."""

    def error(self, order: NDArray[np.int64]) -> float:
        """The shuffling error of an order, int64 [n] positions: the mean over its full mini-batches."""
        errors = np.empty(max(1, len(order) // self.batch_size))
        batch_errors(self.classes, order, self.batch_size, self.whole, errors)
        return float(errors.mean())

    def random_error(self, seed: int) -> float:
        """The shuffling error of random orders: what chance alone brings about."""
        rng = np.random.default_rng(abs(seed))
        return float(np.mean([self.error(rng.permutation(len(self.classes))) for _ in range(_RANDOM_ORDERS)]))


@dataclass(frozen=True)
class ShufflingSearch:
    """How a number of sequences was found.

    ``bound``: of the theory. ``random_error``: of random orders. ``allowed``: the larger of the bound and
    ``RANDOM_MARGIN`` times the random error. ``errors``: shuffling error by number of sequences, of all that
    were tried. ``sequences``: what was found.
    """

    bound: float
    random_error: float
    allowed: float
    errors: dict[int, float]
    sequences: int


def search_sequences(
    test: LabelTest, draw: Callable[[int], NDArray[np.int64]], limit: int, seed: int
) -> ShufflingSearch:
    """The smallest number of sequences, up to ``limit``, whose order is shuffled enough; see the module's
    text.

    ``draw(sequences)`` is an order of so many. Warns and takes ``limit`` where no number is enough.
    """
    random_error = test.random_error(seed)
    allowed = max(test.bound, RANDOM_MARGIN * random_error)
    errors: dict[int, float] = {}

    def enough(sequences: int) -> bool:
        errors[sequences] = test.error(draw(sequences))
        return errors[sequences] <= allowed

    low, high = 0, 1
    while not enough(high):
        if high == limit:
            warn(
                f"even {limit:,} sequences have a shuffling error of {errors[limit]:.3f}, more than "
                f"the {allowed:.3f} that is harmless: use larger mini-batches, or train in random order",
            )
            low = high - 1
            break
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return ShufflingSearch(test.bound, random_error, allowed, errors, high)
