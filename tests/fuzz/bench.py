"""A bench: one copy of the corpus, of which mutants are made and tried, one after the other."""

from __future__ import annotations

import gc
import os
import shutil
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import corpus
import files
import inline
import mutants
import numpy as np
import uses
from numpy.typing import NDArray

import featstore
from featstore.plan.cost import models_path

#: Kinds of mutants, and how often there is one.
KINDS = {
    "store": 0.43, "pack": 0.22, "trace": 0.12, "cache": 0.08, "models": 0.04, "state": 0.03,
    "unfinished": 0.03, "half": 0.01, "recording": 0.04,
}  # fmt: skip
#: Kinds of files, by what is changed.
FILES = (
    "manifest", "map", "array", "graph", "records", "checksums", "metadata", "trace", "cache", "models",
    "state", "journal", "unfinished", "recording",
)  # fmt: skip
USES = 4  # of one mutant, at most
WITH_THREADS = 1 / 60  # of the mutants are used with all threads and the ring

#: What is counted: of a mutant [kind of file, 0] one, of a use [kind of file, 1 + use, 0] one, and [..., 1]
#: if it ended in one of featstore's errors.
SHAPE = (len(FILES), 1 + len(uses.NAMES), 2)


class Bench:
    """Makes mutants of one copy of the corpus, and tries them.

    ``counts``: int64 of :data:`SHAPE`; ``say`` is told what comes next; ``kinds``: only these, of
    :data:`KINDS`.
    """

    def __init__(
        self, folder: Path, seed: int, counts: NDArray[np.int64], say: Callable[[str], object],
        kinds: Sequence[str] = (),
    ) -> None:  # fmt: skip
        os.environ["FEATSTORE_CACHE"] = str(folder)
        self.folder, self.seed, self.counts, self.say = folder, seed, counts, say
        store, base, trace = (folder / name for name in (corpus.STORE, corpus.BASE, corpus.TRACE))
        corpus.save_models(folder)
        self._base = featstore.open(base)
        packs = [base / "packs" / name for name in corpus.PACKS]
        self._stores = {path: mutants.StoreMutant(path) for path in (store, *packs)}
        half = base / "packs" / corpus.HALF
        self._folders = {
            path: files.Folder(path)
            for path in (*(folder / way for way in corpus.UNFINISHED), half, folder / corpus.RECORDING)
        }
        plain = {"trace": trace / "trace.log", "cache": base / "caches/warm.cache", "models": models_path()}
        self._plain = {kind: (path, path.read_bytes()) for kind, path in plain.items()}
        self._trace = files.TraceMutants(*self._plain["trace"])
        self._targets = {
            path: uses.Target(path, seed, base=self._base)
            for path in (store, base, *packs, trace, *self._folders)
        }
        self._kinds = list(kinds or KINDS)
        self._shares = np.cumsum([KINDS[kind] for kind in self._kinds])

    def run(self, number: int) -> dict[str, Any] | None:
        """Make a mutant and use it; what must not be, or None. Leaves the corpus as it was."""
        rng = np.random.default_rng([self.seed, number])
        kind = self._kinds[int(np.searchsorted(self._shares, rng.random() * self._shares[-1], "right"))]
        inline.threads = bool(rng.random() < WITH_THREADS)
        target = self._targets[self._path(kind, rng)]
        what = use = ""
        self.say(kind)
        try:
            kinds, what = self._mutate(kind, target.path, rng)
            if kind == "half":  # what was stopped reads its unfinished pages back as they are
                target.pristine = not any(p in what for p in ("/rows/", ".spill/"))
            if kind == "store":
                target.pristine = not any(
                    p in what for p in ("manifest", "_node", "node_of", "checksums", "graphs/")
                )
            counts = self.counts[FILES.index(kinds[0])]
            counts[0, 0] += 1
            chosen = uses.concerned(kind, kinds)
            wanted = rng.random(len(chosen)) / np.array(list(chosen.values()))
            order = np.argsort(wanted)
            for one in order[: max(1, min(USES, int((wanted < 1).sum())))]:
                made = list(chosen)[one]
                use = made.__name__
                if target.refused and made in uses.OF_OPEN:
                    continue
                self.say(f"{kind}: {what}; {use}")
                count = counts[1 + uses.NAMES.index(use)]
                count[0] += 1
                try:
                    made(target, rng)
                except uses.FINE:
                    count[1] += 1
                gc.collect(0)
            return None
        except (Exception, SystemExit) as caught:
            frames = traceback.extract_tb(caught.__traceback__)
            return {
                "run": number,
                "what": f"{kind}: {what}; {use}",
                "error": f"{type(caught).__name__}: {caught}"[:400],
                "where": [f"{Path(f.filename).name}:{f.lineno}" for f in frames][-5:],
            }
        finally:
            target.close()
            self._restore(kind, target.path)

    def _path(self, kind: str, rng: mutants.Random) -> Path:
        store, base = self.folder / corpus.STORE, self.folder / corpus.BASE
        if kind == "pack":
            return base / "packs" / corpus.PACKS[rng.integers(len(corpus.PACKS))]
        if kind == "unfinished":
            return self.folder / corpus.UNFINISHED[rng.integers(len(corpus.UNFINISHED))]
        return {
            "trace": self.folder / corpus.TRACE,
            "half": base / "packs" / corpus.HALF,
            "recording": self.folder / corpus.RECORDING,
            "store": store,
        }.get(kind, base)

    def _mutate(self, kind: str, path: Path, rng: mutants.Random) -> tuple[list[str], str]:
        """Change something; which kinds of files, and what."""
        if kind in ("store", "pack"):
            return mutants.mutate_store(self._stores[path], rng)
        if kind in ("unfinished", "half"):
            return files.mutate_unfinished(self._folders[path], rng)
        if kind == "recording":
            return [kind], self._trace.recording(self._folders[path], rng)
        if kind == "trace":
            return [kind], self._trace.trace(self._plain[kind][0], rng)
        if kind == "state":
            return [kind], kind
        mutate = files.mutate_cache if kind == "cache" else files.mutate_models
        return [kind], mutate(*self._plain[kind], rng)

    def _restore(self, kind: str, path: Path) -> None:
        if path in self._stores and kind in ("store", "pack"):
            self._stores[path].restore()
        elif path in self._folders:
            self._folders[path].restore()
        elif kind in self._plain:
            file, data = self._plain[kind]
            file.write_bytes(data)

    def close(self) -> None:
        self._base.close()


def prepare(folder: Path, seed: int, guard_pages: bool, kinds: Sequence[str] = ()) -> None:
    """Make the corpus below ``folder``/corpus, and use all of it that mutants of ``kinds`` are made of:
    kernels are compiled, and nothing of featstore runs any more when children are forked."""
    import featstore_cli.gc
    import featstore_cli.inspect  # noqa: F401

    made = folder / "corpus"
    made.mkdir(parents=True)
    corpus.make(made, seed)
    if guard_pages:
        import guard

        guard.install()
    counts = np.zeros(SHAPE, np.int64)
    warmed = folder / "warmed"
    shutil.copytree(made, warmed)
    for threads in (False, True):  # the second time with what does not depend on inline any more
        if threads:
            inline.install()
        bench = Bench(warmed, seed, counts, lambda what: None)
        for kind in kinds or KINDS:
            for path, target in bench._targets.items():
                if not fits(kind, path):
                    continue
                for use in uses.OF[kind]:
                    for turn in range(3):
                        inline.threads = turn == 2
                        try:
                            use(target, np.random.default_rng([seed, 7, turn]))
                        except uses.FINE:
                            if use not in MAY_FAIL:
                                raise
                        target.close()
                        bench._restore(kind, path)
        bench.close()
    shutil.rmtree(warmed)
    gc.collect()
    gc.freeze()


#: States are changed, and what was stopped is no store: that is refused.
MAY_FAIL = {
    uses.resume_compiled, uses.resume_online, uses.resume_mega, uses.resume_order, uses.verify,
    uses.unfinished,
}  # fmt: skip


def fits(kind: str, path: Path) -> bool:
    """Whether mutants of this kind are made of what is at ``path``."""
    name = path.name
    return {
        "pack": name in corpus.PACKS,
        "unfinished": name in corpus.UNFINISHED,
        "half": name == corpus.HALF,
        "recording": name == corpus.RECORDING,
        "trace": name == corpus.TRACE,
        "store": name == corpus.STORE,
    }.get(kind, name == corpus.BASE)
