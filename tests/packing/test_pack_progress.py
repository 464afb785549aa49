"""Progress of a pack: stages with totals that are true, that move, and that end at all of it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.packing.packing import Progress

X = np.random.default_rng(0).standard_normal((20_000, 16)).astype(np.float32)
PERMUTATION = np.random.default_rng(1).permutation(len(X))
RING = np.stack([np.arange(len(X)), (np.arange(len(X)) + 1) % len(X)])


def stages_of(seen: list[Progress]) -> dict[str, list[Progress]]:
    """By stage; holds what is true of any pack's progress on the way."""
    groups = [(key, list(group)) for key, group in groupby(seen, key=lambda p: (p.table, p.stage))]
    assert len({key for key, _ in groups}) == len(groups), "a stage is not taken up again"
    for _, group in groups:
        assert len({p.total_bytes for p in group}) == 1, "a total does not change under way"
        done = [p.done_bytes for p in group]
        assert done == sorted(done)
        if group[0].total_bytes is not None:
            assert done[-1] == group[0].total_bytes, "no more than there is, and all of it at the end"
    return {key[1]: group for key, group in groups}


def big_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("permute.SOURCE_BLOCK_BYTES", "spill.PIECE_BYTES"):
        monkeypatch.setattr(f"featstore.packing.{name}", 64 << 10)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"order": None, "write": X.nbytes}),
        ({"dtype": "float16"}, {"order": None, "write": X.nbytes // 2}),
        (
            {"order": "permutation", "permutation": PERMUTATION},
            {"order": None, "read": X.nbytes, "write": X.nbytes},
        ),
        (
            {"graph": RING, "order": "given"},
            {"graph": None, "order": None, "topology": None, "write": X.nbytes},
        ),
    ],
)
def test_stages_have_totals_that_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, expected: Any
) -> None:
    big_pieces(monkeypatch)
    seen: list[Progress] = []
    featstore.pack(tmp_path / "s", X, progress=seen.append, **options).close()
    stages = stages_of(seen)
    assert {stage: group[0].total_bytes for stage, group in stages.items()} == expected
    for stage, total in expected.items():
        if total:
            assert len(stages[stage]) > 5, "it moves"


def test_a_spill_is_two_passes_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big_pieces(monkeypatch)
    monkeypatch.setattr("featstore.packing.permute.fits_in_memory", lambda job: False)
    seen: list[Progress] = []
    featstore.pack(
        tmp_path / "s", X, order="permutation", permutation=PERMUTATION, progress=seen.append
    ).close()
    assert {s: g[0].total_bytes for s, g in stages_of(seen).items()} == {
        "order": None, "spill": X.nbytes, "write": X.nbytes
    }  # fmt: skip


def test_rows_whose_number_is_unknown_are_counted_first(tmp_path: Path) -> None:
    seen: list[Progress] = []
    featstore.pack(
        tmp_path / "s", (X[at : at + 1000] for at in range(0, len(X), 1000)), progress=seen.append
    ).close()
    stages = stages_of(seen)
    assert (stages["count"][0].total_bytes, stages["count"][-1].done_bytes) == (None, X.nbytes)
    assert stages["write"][0].total_bytes == X.nbytes


def test_several_tables_have_stages_of_their_own(tmp_path: Path) -> None:
    seen: list[Progress] = []
    featstore.pack(tmp_path / "s", {"a": X, "b": X[:100]}, progress=seen.append).close()
    stages_of(seen)
    assert [(p.table, p.total_bytes) for p in seen if p.stage == "write" and not p.done_bytes] == [
        ("a", X.nbytes), ("b", X[:100].nbytes)
    ]  # fmt: skip


def test_a_resumed_pack_begins_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big_pieces(monkeypatch)
    monkeypatch.setattr("featstore.packing.permute.CHECKPOINT_BYTES", 128 << 10)

    def stop(p: Progress) -> None:
        if p.stage == "write" and p.done_bytes > 600_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        featstore.pack(tmp_path / "s", X, progress=stop)
    seen: list[Progress] = []
    featstore.pack(tmp_path / "s", X, progress=seen.append, resume=True).close()
    write = stages_of(seen)["write"]
    assert 0 < write[0].done_bytes <= 700_000
