"""The pages for users: every block runs as it stands, every link leads somewhere, and every error has its
entry.

A page's blocks run one after the other, in a folder where the quick start has run. Of a ``console`` block
the lines run that begin with ``$``. One that cannot run here says why, in a comment right above it; there is
no other exception, but the two commands of the README that CI and a newcomer run.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import re
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner
from featstore_cli.main import cli

from featstore import errors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
START = "quickstart"
PAGES = (
    START, "../README", "SECURITY", "choosing-a-mode", "cli", "coming-from", "concepts", "design",
    "durability", "faq", "glossary", "hosts", "how-to", "index", "memory", "orders-of-training",
    "performance", "refused", "troubleshooting", "using",
)  # fmt: skip
#: Pages whose blocks are not run, and why.
OUTSIDE = {
    "CONTRIBUTING": "its commands are those of the justfile and of CI, the whole suite among them",
    "api": "its blocks are docstrings, which the site's test looks at",
    "architecture": "its blocks are drawings of where modules stand",
}
#: What users need not read as code: a drawing, what a program prints.
SHOWN = ("text",)
RUN = ("python", "sh", "console")
_FENCE = re.compile(
    r"(?:^<!-- (?:not run here: (?P<why>[^\n]+)|(?P<marked>demo|tests)) -->\n)?^```(?P<kind>[^\n]*)\n",
    re.MULTILINE,
)


class Block(NamedTuple):
    """A block of a page: what it is of, its text, the line where that begins, and why it is not run, or
    nothing."""

    kind: str
    text: str
    line: int
    why: str


def blocks_of(text: str) -> list[Block]:
    """All of a page's blocks, in order."""
    found, at = [], 0
    while fence := _FENCE.search(text, at):
        end = text.index("\n```", fence.end() - 1) + 1
        line = text.count("\n", 0, fence.end())
        why = fence["why"] or fence["marked"] or ""
        found.append(Block(fence["kind"], text[fence.end() : end], line, why))
        at = end + 3
    return found


def run_page(name: str, folder: Path) -> None:
    """Run a page's blocks in ``folder``. Of its Python, all blocks have the same names."""
    names: dict[str, Any] = {"__name__": name}
    with contextlib.chdir(folder):
        for block in blocks_of((DOCS / f"{name}.md").read_text()):
            if block.why or block.kind in SHOWN:
                continue
            if block.kind == "python":
                code = compile("\n" * block.line + block.text, f"{name}.md", "exec")
                exec(code, names)
            else:
                for line in lines_of(block):
                    run_line(line)


def lines_of(block: Block) -> list[str]:
    """The lines of a block that a shell is given; one may go on after a backslash."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.kind == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return lines


def make_ogb(folder: Path) -> None:
    """A little data set as OGB's own package unzips it, for those who come from there."""
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 60, (300, 2))
    files = {
        "raw/node-feat": rng.random((60, 4)), "raw/edge": edges, "raw/node-label": np.arange(60) % 3,
        "raw/num-node-list": [60], "raw/num-edge-list": [300], "split/sales_ranking/train": np.arange(20),
    }  # fmt: skip
    for name, values in files.items():
        path = folder / "dataset/ogbn_products" / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, values, "%.6f" if name.endswith("feat") else "%d", ",")


def run_line(line: str) -> None:
    """Run a line of a shell; the command itself in this process."""
    words = shlex.split(line)
    if words[0] != "featstore":
        subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True, timeout=60)
        return
    result = CliRunner().invoke(cli, words[1:], prog_name="featstore")
    assert result.exit_code == 0, (line, result.output, result.exception)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which a new user has gone through the quick start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages, when they are imported
        pytest.importorskip("torch_geometric")
        import torch_geometric.nn  # noqa: F401
    folder = tmp_path_factory.mktemp("started")
    run_page(START, folder)
    return folder


def test_the_quick_start_leaves_a_store_that_is_sound(started: Path) -> None:
    assert (started / "papers.fs" / "featstore.json").is_file()
    training = [
        block.text
        for block in blocks_of((DOCS / f"{START}.md").read_text())
        if "optimiser.step" in block.text
    ]
    assert len(training) == 1
    loop = training[0].partition("with store.loader")
    assert len((loop[1] + loop[2]).splitlines()) <= 10, "ten lines"


@pytest.mark.parametrize("name", [name for name in PAGES if name != START])
def test_every_block_runs(name: str, started: Path, tmp_path: Path) -> None:
    here = Path(shutil.copytree(started, tmp_path / "here"))
    if name == "coming-from":
        make_ogb(here)
    run_page(name, here)


@pytest.mark.parametrize("name", PAGES)
def test_blocks_are_run_or_say_why_not(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    blocks = blocks_of(text)
    assert 2 * len(blocks) == len(re.findall(r"^ *(```|~~~)", text, re.MULTILINE)), "no block escapes"
    marked = text.count("<!-- demo -->") + text.count("<!-- tests -->") if name == "../README" else 0
    assert len([block for block in blocks if block.why]) == text.count("not run here:") + marked
    for block in blocks:
        assert block.kind in (*RUN, *SHOWN), block
        assert block.kind not in SHOWN or not block.why, block
        assert block.why or block.kind in SHOWN or block.kind == "python" or lines_of(block), block


def test_every_page_is_among_these() -> None:
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages == (set(PAGES) - {"../README"}) | set(OUTSIDE)
    assert not set(PAGES) & set(OUTSIDE)


def anchors(path: Path) -> set[str]:
    """The headings of a page, as links spell them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    page = DOCS / f"{name}.md"
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        assert not link.startswith("http"), f"{link}: pages stand for themselves"
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_leads_to_every_page() -> None:
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", (DOCS / "index.md").read_text())}
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= links


ERRORS = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, Exception)]


def entries() -> dict[str, str]:
    """The entries of the page of errors, by their headings."""
    text = (DOCS / "troubleshooting.md").read_text().partition("\n## ")[2]
    parts = ("## " + text).split("\n## ")
    found = {part.removeprefix("## ").partition("\n")[0]: part.partition("\n")[2] for part in parts}
    return {title: body for title, body in found.items() if title.isidentifier()}


def test_every_error_has_its_entry_and_no_other() -> None:
    assert list(entries()) == sorted(one.__name__ for one in ERRORS)


@pytest.mark.parametrize("name", sorted(one.__name__ for one in ERRORS))
def test_an_entry_has_cause_and_remedy(name: str) -> None:
    body = entries()[name]
    for part in ("**What.** ", "**Causes.** ", "**What to do.** "):
        assert len(re.findall(rf"^{re.escape(part)}\S", body, re.MULTILINE)) == 1, part


def test_no_entry_names_a_class_that_is_not_there() -> None:
    known = {one.__name__ for one in ERRORS} | set(dir(builtins))
    for name in PAGES:
        named = set(re.findall(r"\b[A-Z][A-Za-z]+(?:Error|Warning)\b", (DOCS / f"{name}.md").read_text()))
        assert named <= known, name
