"""Variables of the environment: those that are read are those that are told, and no other is passed over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from featstore.base.environment import VARIABLES

ROOT = Path(__file__).parents[2]


def test_the_page_tells_those_that_are_read() -> None:
    read = set()
    for folder in ("featstore", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r'"(FEATSTORE_[A-Z_]+[A-Z])"', path.read_text()))
    told = re.findall(
        r"^\| `(FEATSTORE_[A-Z_]+)` \|", (ROOT / "docs" / "how-to.md").read_text(), re.MULTILINE
    )
    assert read == set(told) == set(VARIABLES)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FEATSTORE_LOGS", "has FEATSTORE_LOGS, which featstore does not read: is FEATSTORE_LOG meant?"),
        ("FEATSTORE_7", "there are FEATSTORE_CACHE, FEATSTORE_LOG"),
        ("FEATSTORE_LOG", ""),
        ("FEATSTORELESS", ""),
    ],
)
def test_an_unknown_one_is_a_warning(name: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import featstore.base.logs"], env=os.environ | {name: "info"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert says in done.stderr
    assert ("does not read" in done.stderr) == bool(says)
