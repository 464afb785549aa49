"""``featstore loader-costs``: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import Call, parsed

OPTIONS = ["--fanouts", "4,3", "--batch-size", 100, "--memory", "64MiB"]


def test_costs_as_json_and_as_a_table(call: Call, store: Path) -> None:
    before = sorted(store.parent.rglob("*"))
    data = parsed(call("loader-costs", store, *OPTIONS, "--disk", "3x", "--step-ms", 5, "--json"))
    assert sorted(store.parent.rglob("*")) == before, "something was left in the store"
    assert data["schema"] == "featstore.loader-costs/1"
    assert list(data["modes"]) == ["online", "compiled", "rolling", "partitions"]
    assert data["mode"] == "online"
    assert data["train_seconds"] == 0.005
    text = call("loader-costs", store, *OPTIONS, "--disk", "3x").stdout
    assert "an epoch" in text
    assert "auto: online, because " in text
    for mode in data["modes"]:
        assert f"\n{mode} " in text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--fanouts", "many"], "fan-outs"),
        (["--fanouts", "3", "--share", 2], "--share"),
        (["--fanouts", "3", "--graph", "nobody"], "nobody"),
        (["--fanouts", "3", "--train", "nobody"], "nobody"),
        ([], "--fanouts"),
    ],
)
def test_wrong_usage(call: Call, store: Path, wrong: list[object], says: str) -> None:
    assert says in call("loader-costs", store, *wrong, code=2).stderr


def test_a_disk_that_is_no_size(call: Call, store: Path) -> None:
    assert "disk" in call("loader-costs", store, *OPTIONS, "--disk", "much", code=1).stderr
