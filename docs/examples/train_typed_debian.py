"""A typed graph from data that every Debian machine has: which package depends on which, what source it is
built from, and who maintains that. A small model learns the archive's sections, then which dependencies
there are.

    python train_typed_debian.py [PACKAGES...] [--keep STORE]

PACKAGES: files as the archive has them; by default those of this machine, /var/lib/apt/lists after
``apt-get update``. Needs torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import featstore
from featstore.sampling.links import LinkSampler, Negatives
from featstore.sampling.typed import TypedNeighborSampler

LISTS = Path("/var/lib/apt/lists")
COLUMNS, HIDDEN = 256, 64
FANOUTS, LINKS = (8, 4), 2048

Relation = tuple[str, str, str]


def stanzas(path: Path) -> Iterator[dict[str, str]]:
    """The packages of a list: field to value, without what stands on further lines."""
    text = subprocess.run(
        ["/usr/lib/apt/apt-helper", "cat-file", str(path)], check=True, capture_output=True, text=True
    ).stdout if path.suffix == ".lz4" else path.read_text()  # fmt: skip
    for stanza in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.split("\n") if ": " in line and line[0] != " ")
        if "Package" in fields:
            yield fields


def words_of(fields: dict[str, str]) -> list[str]:
    """What a package says of itself."""
    text = fields["Package"].replace("-", " ") + " " + fields.get("Description", "")
    return [word.strip(".,()'\"").lower() for word in text.split()]


def hashed(texts: list[list[str]]) -> np.ndarray:
    """float32 [texts, COLUMNS]: words hashed to signed columns (the hashing trick: Weinberger et al., ICML
    2009), of length 1."""
    rows = np.zeros((len(texts), COLUMNS), np.float32)
    for row, words in zip(rows, texts, strict=True):
        for word in words:
            code = zlib.crc32(word.encode())
            row[code % COLUMNS] += 1 if code >> 31 else -1
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


class Archive:
    """Nodes by type, and edges by relation, int64 [2, edges]."""

    def __init__(self, paths: list[Path]) -> None:
        found = {
            fields["Package"]: fields for path in paths for fields in stanzas(path)
        }  # the newest of each
        packages = list(found.values())
        number = {name: place for place, name in enumerate(found)}
        self.names = list(found)
        self.features = hashed([words_of(one) for one in packages])
        self.sections, self.section = np.unique(
            [one.get("Section", "none").rpartition("/")[2] for one in packages], return_inverse=True
        )
        sources: dict[str, int] = {}
        source_of = [
            sources.setdefault(one.get("Source", one["Package"]).split()[0], len(sources)) for one in packages
        ]
        maintainers: dict[str, int] = {}
        by = {
            source: maintainers.setdefault(one.get("Maintainer", "nobody"), len(maintainers))
            for source, one in zip(source_of, packages, strict=True)
        }
        depends = [
            (place, number[name])
            for place, one in enumerate(packages)
            for name in {
                part.split()[0].partition(":")[0]
                for part in one.get("Depends", "").split(",")
                if part.strip()
            }
            if name in number
        ]
        self.counts = {"package": len(packages), "source": len(sources), "maintainer": len(maintainers)}
        there = {
            ("package", "depends", "package"): np.array(depends).T.reshape(2, -1),
            ("source", "builds", "package"): np.array([source_of, range(len(packages))]),
            ("maintainer", "keeps", "source"): np.array([list(by.values()), list(by)]),
        }
        back = {
            (target, f"rev_{name}", source): edges[::-1].copy()
            for (source, name, target), edges in there.items()
        }
        self.edges: dict[Relation, np.ndarray] = {**there, **back}


class Layer(nn.Module):
    """GraphSAGE by relation: each node's own state, and of each relation into its type the mean of its
    neighbours' (R-GCN: Schlichtkrull et al., ESWC 2018; SAGE: Hamilton et al., NeurIPS 2017)."""

    def __init__(self, relations: list[Relation], types: list[str]) -> None:
        super().__init__()
        self.own = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN) for name in types})
        self.of = nn.ModuleDict({"__".join(one): nn.Linear(HIDDEN, HIDDEN, bias=False) for one in relations})

    def forward(self, h: dict[str, Tensor], edges: dict[Relation, Tensor]) -> dict[str, Tensor]:
        out = {name: self.own[name](one) for name, one in h.items()}
        for relation, (row, col) in edges.items():
            source, _, target = relation
            if len(row) == 0:
                continue
            total = torch.zeros_like(h[target]).index_add_(0, col, h[source][row])
            degree = torch.bincount(col, minlength=len(h[target])).clamp_(min=1)[:, None]
            out[target] = out[target] + self.of["__".join(relation)](total / degree)
        return {name: torch.relu(one) for name, one in out.items()}


class Model(nn.Module):
    """Packages have features; sources and maintainers have a learned vector each, found by their ids."""

    def __init__(self, counts: dict[str, int], relations: list[Relation], classes: int) -> None:
        super().__init__()
        self.read = nn.Linear(COLUMNS, HIDDEN)
        self.known = nn.ModuleDict(
            {name: nn.Embedding(count, HIDDEN) for name, count in counts.items() if name != "package"}
        )
        self.layers = nn.ModuleList([Layer(relations, list(counts)) for _ in FANOUTS])
        self.classify = nn.Linear(HIDDEN, classes)

    def forward(self, batch: Any) -> Tensor:
        """float32 [packages of the mini-batch, HIDDEN]."""
        h = {"package": torch.relu(self.read(batch.x["package"]))}
        h |= {name: one(torch.as_tensor(batch.n_id[name])) for name, one in self.known.items()}
        for layer in self.layers:
            h = layer(h, batch.edge_index)
        return h["package"]


def accuracy(model: Model, loader: Any) -> float:
    """Of sections, on a loader's seeds."""
    right = seen = 0
    with torch.no_grad():
        for batch in loader:
            found = model.classify(model(batch)[: batch.batch_size]).argmax(1)
            right += int((found == batch.section["package"][: batch.batch_size]).sum())
            seen += batch.batch_size
    return right / seen


def sections(store: featstore.Store, archive: Archive, epochs: int) -> Model:
    """Learn the sections of packages; those that are not trained on are a test."""
    model = Model(archive.counts, store.edge_types, len(archive.sections))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.005)
    options: dict[str, Any] = {
        "fanouts": FANOUTS, "batch_size": 512, "memory": "256MiB", "tensors": True,
        "attach": "package.section",
    }  # fmt: skip
    with store.loader(seeds="package.train", **options) as loader:
        for _ in range(epochs):
            total, count = 0.0, 0
            for batch in loader:
                out = model.classify(model(batch)[: batch.batch_size])
                loss = nn.functional.cross_entropy(out, batch.section["package"][: batch.batch_size])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total, count = total + loss.item(), count + 1
            print(f"sections, epoch {loader.epoch}: loss {total / count:.3f}")
    with store.loader(seeds="package.test", seeds_in_order=True, **options) as loader:
        print(f"sections: {accuracy(model, loader):.3f} of the packages kept aside are right")
    return model


def edges_of(around: Any, relation: Relation) -> Tensor:
    """int64 [2, k], of one relation of a sampled subgraph."""
    return torch.from_numpy(np.stack([around.row[relation], around.col[relation]]))


def links(store: featstore.Store, archive: Archive, epochs: int) -> None:
    """Learn which package depends on which: links that there are against as many pairs drawn anew."""
    depends = ("package", "depends", "package")
    given = archive.edges[depends]
    order = np.random.default_rng(1).permutation(given.shape[1])
    test, train = np.split(order, [len(order) // 10])
    kept = {one: store.graphs["__".join(one)].csc() for one in store.edge_types if "depends" not in one[1]}
    sampler = LinkSampler(
        TypedNeighborSampler(kept, archive.counts, FANOUTS),
        link_type=depends,
        negatives=Negatives("binary", 1),
    )  # without the dependencies, which are to be found
    model = Model(archive.counts, list(kept), 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.005)
    with store.reader(memory="128MiB", tables=["package"]) as reader:
        for epoch in range(epochs + 1):
            testing, right, seen = epoch == epochs, 0, 0
            for number, begin in enumerate(range(0, len(test if testing else train), LINKS)):
                some = (test if testing else train)[begin : begin + LINKS]
                found = sampler.sample(given[:, some], number, epoch=epoch)
                around = found.subgraph
                rows = reader.read({"package": around.node["package"]})["package"]
                batch = Namespace(
                    x={"package": torch.from_numpy(rows)}, n_id=around.node,
                    edge_index={one: edges_of(around, one) for one in kept},
                )  # fmt: skip
                with torch.set_grad_enabled(not testing):
                    ends = model(batch)[torch.from_numpy(found.edge_label_index)]
                    score = model.classify(ends[0] * ends[1])[:, 0]
                label = torch.from_numpy(found.edge_label).to(score.dtype)
                if not testing:
                    optimiser.zero_grad()
                    nn.functional.binary_cross_entropy_with_logits(score, label).backward()
                    optimiser.step()
                right, seen = right + int(((score > 0) == (label > 0)).sum()), seen + len(label)
            print(
                f"dependencies, {'test' if testing else f'epoch {epoch + 1}'}: {right / seen:.3f} are right"
            )


def main() -> None:
    """Pack, learn sections, learn dependencies, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", type=Path)
    parser.add_argument("--keep", type=Path, help="where the store is to stay")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    paths = given.packages or sorted(LISTS.glob("*_Packages*"))
    if not paths:
        sys.exit(f"{LISTS} has no lists of packages: run apt-get update, or name files")
    archive = Archive(paths)
    print(
        f"{archive.counts}, {sum(one.shape[1] for one in archive.edges.values()):,} edges of "
        f"{len(archive.edges)} types"
    )
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    train = rng.random(archive.counts["package"]) < 0.8
    with tempfile.TemporaryDirectory() as folder:
        path = given.keep or Path(folder) / "archive"
        tables = {"package": archive.features} | {n: c for n, c in archive.counts.items() if n != "package"}
        arrays = {"package.section": archive.section, "package.train": train, "package.test": ~train}
        with featstore.pack(path, tables, graph=archive.edges, arrays=arrays, edge_ids=True) as store:
            sections(store, archive, given.epochs)
            links(store, archive, given.epochs)
            featstore.export(store, "package", Path(folder) / "package.npy")
            back = np.load(Path(folder) / "package.npy", mmap_mode="r")
            print(f"exported {len(back):,} rows, all as given: {bool((back == archive.features).all())}")


if __name__ == "__main__":
    main()
