"""A buffer over the base store, for rows that a compiled trace leaves there."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from compiled_support import Case, make_case, placed, rows_of, skewed_batches

import featstore
from featstore.compile.placement import Location, Placement
from featstore.errors import ArgumentError, BudgetError, IncompleteStoreError
from featstore.loaders.compiled.loader import CompiledLoader
from featstore.loaders.compiled.trace import CompiledTrace

BATCHES = 9
SIZES = {"paper": 400, "author": 150}
BASE, PACKED, SHARED = (int(c) for c in Location)
MIXED = placed(Placement(3, (BASE, SHARED, PACKED), 1, 0.5, PACKED))
ALL_PACKED = placed(Placement(3, (PACKED, PACKED, PACKED), 1, 0.5, PACKED))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two tables; ``min`` and ``fixed`` leave rows in the base store, ``whole`` none. Not to be written
    to."""
    rows = {"paper": rows_of(400, (25,), np.float32, 1), "author": rows_of(150, (600,), np.float16, 2)}
    made = make_case(
        tmp_path_factory.mktemp("case"), rows, skewed_batches(SIZES, BATCHES, 120, 3), permuted=True
    )
    for residency in ("min", "fixed"):
        made.compile(residency, residency=residency, policy=MIXED, cache=30_000)
    made.compile("whole", policy=ALL_PACKED, cache=30_000)
    return made


@pytest.mark.parametrize("residency", ["min", "fixed"])
@pytest.mark.parametrize("policy", ["lru", "s3-fifo", "auto"])
def test_rows_are_the_same_and_read_once(case: Case, residency: str, policy: str) -> None:
    """Where the buffer holds all that was left in the base store, later rounds do not read it."""
    with case.store.compiled(residency) as compiled:
        forecast = compiled.entry.forecast["tables"]
        left = sum(forecast[name]["base_rows"] for name in SIZES)
        with CompiledLoader(compiled, buffer=featstore.Buffer(policy, "4MiB"), memory="64MiB") as loader:
            case.check(loader, range(BATCHES))
            first = loader.report().buffer_hits
            for done in (1, 2):
                case.check(loader, range(BATCHES))
                assert loader.report().buffer_hits == first + done * left
        with CompiledLoader(compiled, memory="64MiB") as loader:
            case.check(loader, range(BATCHES))
            assert loader.report().buffer_hits == 0


def test_resuming_with_a_buffer(case: Case) -> None:
    with case.store.compiled("min") as compiled, CompiledLoader(compiled) as loader:
        for number, _ in enumerate(loader):
            if number == 4:
                break
        state = loader.state()
    options = {"buffer": featstore.Buffer("lru", "1MiB"), "memory": "64MiB"}
    with case.store.compiled("min") as compiled, CompiledLoader(compiled, **options) as loader:
        loader.load_state(state)
        case.check(loader, range(5, BATCHES))


@pytest.mark.parametrize("memory", [None, "4MiB"])
def test_the_smallest_budget_works(case: Case, memory: str | None) -> None:
    buffer = featstore.Buffer("lru", memory)
    with case.store.compiled("min") as compiled:
        with pytest.raises(BudgetError, match="and its buffer") as caught:
            CompiledLoader(compiled, buffer=buffer, memory=compiled.needed_bytes(2))
        with CompiledLoader(compiled, buffer=buffer, memory=caught.value.needed_bytes) as loader:
            case.check(loader, range(BATCHES))


def test_what_is_refused(case: Case, tmp_path: Path) -> None:
    with case.store.compiled("whole") as compiled, pytest.raises(ArgumentError, match="reads none"):
        CompiledLoader(compiled, buffer=featstore.Buffer("lru"))
    for wrong in ("lru", 2**20, featstore.Static("degree"), True):
        with (
            case.store.compiled("min") as compiled,
            pytest.raises(ArgumentError, match=r"a featstore\.Buffer"),
        ):
            CompiledLoader(compiled, buffer=wrong)


def test_without_the_base_store_nothing_may_have_been_left_there(case: Case, tmp_path: Path) -> None:
    for name in ("min", "whole"):
        shutil.copytree(case.store.path / "packs" / name, tmp_path / name)
    with (
        featstore.open(tmp_path / "whole") as alone,
        CompiledTrace(alone, None) as compiled,
        CompiledLoader(compiled) as loader,
    ):
        case.check(loader, range(BATCHES))
    with (
        featstore.open(tmp_path / "min") as alone,
        pytest.raises(IncompleteStoreError, match="reads rows of"),
    ):
        CompiledTrace(alone, None)
