"""What ``mega_accuracy.py`` trains on, and how: data sets with their splits, and where mini-batches come
from."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Plan:
    """A data set and how it is trained on. ``hidden_share``: of the nodes, those whose features are put to
    zero."""

    title: str
    file: str
    split: str
    partitions: int
    batch_size: int
    rounds: int
    learning_rate: float
    width: int = 64
    fanouts: tuple[int, int] = (10, 10)
    weight_decay: float = 0.0
    hidden_share: float = 0.0
    variants_of_all: tuple[str, ...] = ()
    variants_of_sage: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """Where mini-batches come from. ``share``: of the partitions, one in so many is in memory; 0 for the
    whole graph.

    ``sliding``: a quarter of the partitions is replaced from step to step. ``whole``: the seeds of
    mega-batches, in their order, but neighbours from the whole graph, which tells what of a difference comes
    from the order and what from lost neighbours.
    """

    title: str
    share: int = 8
    passes: int = 2
    hubs: bool = True
    sliding: bool = False
    hub_rank: str = "degree"
    weights: bool = False
    whole: bool = False


VARIANTS = {
    "ns": Variant("neighbour sampling in memory", share=0),
    "hb": Variant("mega-batches of an eighth, two passes"),
    "hb_no_hubs": Variant("without hubs", hubs=False),
    "hb_one_pass": Variant("one pass", passes=1),
    "hb_sliding": Variant("a quarter replaced, same memory", sliding=True),
    "hb_external": Variant("hubs by external edges", hub_rank="external"),
    "hb_weights": Variant("weighted edges", weights=True),
    "hb_weights_no_hubs": Variant("weighted edges, without hubs", weights=True, hubs=False),
    "hb_order": Variant("their order alone, all neighbours", whole=True),
    "hb_4": Variant("mega-batches of a quarter, one pass", share=4, passes=1),
    "hb_2": Variant("mega-batches of a half, one pass", share=2, passes=1),
    "hb_16": Variant("a sixteenth resident", share=16),
    "hb_16_no_hubs": Variant("a sixteenth resident, without hubs", share=16, hubs=False),
}
_THREE = ("ns", "hb", "hb_no_hubs")
_LARGER = ("hb_4", "hb_2")
_REST = ("hb_order", "hb_one_pass", "hb_sliding", "hb_external", "hb_weights", "hb_weights_no_hubs")
_SIXTEENTH = ("hb_16", "hb_16_no_hubs")
PLANS = {
    "computers": Plan(
        "amazon computers",
        "amazon_computers",
        "official",
        512,
        86,
        24,
        0.005,
        variants_of_all=(*_THREE, *_LARGER, "hb_order"),
    ),
    "cora": Plan(
        "cora",
        "cora_planetoid",
        "official",
        64,
        17,
        30,
        0.005,
        weight_decay=5e-4,
        variants_of_all=(*_THREE, *_LARGER, "hb_order"),
    ),
    "arxiv": Plan(
        "arxiv, official split",
        "ogbn_arxiv_tape40",
        "official",
        1024,
        1024,
        8,
        0.01,
        variants_of_all=(*_THREE, *_LARGER),
    ),
    "arxiv_tenth": Plan(
        "arxiv, a tenth trains",
        "ogbn_arxiv_tape40",
        "tenth",
        1024,
        512,
        14,
        0.01,
        variants_of_all=(*_THREE, *_LARGER, "hb_order"),
    ),
    "arxiv_hidden": Plan(
        "arxiv, a tenth trains, the features of nine tenths hidden",
        "ogbn_arxiv_tape40",
        "tenth",
        1024,
        512,
        20,
        0.01,
        hidden_share=0.9,
        variants_of_sage=(*_THREE, *_LARGER, *_REST, *_SIXTEENTH),
    ),
}


@dataclass(frozen=True)
class Data:
    """A data set in memory: CSC, features float32 [n, d], labels int64 [n], and node ids of the splits."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    x: NDArray[np.float32]
    labels: NDArray[np.int64]
    train: NDArray[np.int64]
    val: NDArray[np.int64]
    test: NDArray[np.int64]


def load(folder: Path, plan: Plan) -> Data:
    """The data set of a plan. Bags of words are scaled to length 1, the guesses of arxiv to at most 1."""
    path = folder / f"{plan.file}.npz"
    if not path.exists():
        raise click.ClickException(
            f"{path} does not exist; pass the folder that holds it as --data, or choose --sets"
        )
    file = np.load(path)
    if "features" in file:
        x = file["features"].astype(np.float32)
    else:
        from scipy.sparse import csr_matrix

        parts = (file["feat_data"], file["feat_indices"], file["feat_indptr"])
        x = csr_matrix(parts, shape=tuple(file["feat_shape"])).toarray().astype(np.float32)
        x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1)
    x /= x.max()
    rng = np.random.default_rng(0)
    x[rng.random(len(x)) < plan.hidden_share] = 0
    splits = [file[f"{name}_idx"].astype(np.int64) for name in ("train", "val", "test")]
    if plan.split == "tenth":  # one tenth trains; of the others one tenth chooses the epoch
        order = rng.permutation(len(x))
        tenth = len(x) // 10
        splits = [order[:tenth], order[tenth : 2 * tenth], order[2 * tenth :]]
    return Data(file["indptr"], file["indices"], x, file["labels"].astype(np.int64), *splits)


def trained_as(plan: Plan, variant: Variant) -> int:
    """A fingerprint of all that a run's result depends on but its seed; what was trained otherwise is no part
    of a result."""
    given: dict[str, Any] = {}
    # what is left at its default says nothing, so that a new field keeps old runs
    for part in (plan, variant):
        given |= {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
    for key in ("title", "variants_of_all", "variants_of_sage"):
        given.pop(key, None)
    return zlib.crc32(json.dumps(given, sort_keys=True).encode())
