"""The notebooks: their cells run in order, and are kept without what they gave."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))

#: Shows what a cell ends with, as a notebook does.
SHOW = """
def _show(value):
    if value is None:
        return
    html = value._repr_html_() if hasattr(value, "_repr_html_") else ""
    assert "<script" not in html and len(html) < 30_000
    _shown.append(html or repr(value))
_shown = []
"""


def cells_of(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / name).read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells: list[dict[str, Any]] = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    return cells


def program_of(cells: list[dict[str, Any]]) -> str:
    made = [SHOW]
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            shown = ast.Call(ast.Name("_show", ast.Load()), [last.value], [])
            tree.body[-1] = ast.copy_location(ast.Expr(shown), last)
        made.append(ast.unparse(ast.fix_missing_locations(tree)))
    return "\n".join(made)


def test_there_are_some() -> None:
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_kept_without_what_it_gave(name: str) -> None:
    for cell in cells_of(name):
        if cell["cell_type"] == "code":
            assert (cell["execution_count"], cell["outputs"]) == (None, [])


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("from-your-files-to-a-model.ipynb", "assert accuracy > 0.6, accuracy"),
        ("looking-at-a-store.ipynb", "assert len([one for one in _shown if '<' in one]) >= 4, _shown"),
    ],
)
def test_its_cells_run(name: str, holds: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(program_of(cells_of(name)) + f"\n{holds}\n")
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_lead_somewhere(name: str) -> None:
    import re

    for cell in cells_of(name):
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\(([^)]+)\)", "".join(cell["source"])):
                assert (FOLDER / link).is_file(), link
