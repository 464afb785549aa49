"""The site builds from a checkout without a warning, without the network, and holds every page and every
public name."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest
from browser import seen
from featstore_cli.main import cli

import featstore
from featstore import errors
from featstore.loaders.options import LoaderOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Looking for garbage takes a quarter of the time, and finds none.
    sphinx = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
    built = subprocess.run(
        [sys.executable, "-c", sphinx, "-q", "-W", "--keep-going", "-c", "docs", "-d", str(out / "cache"),
         ".", str(out / "html")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return out / "html"


def test_every_page_of_the_repository_is_in_it(site: Path) -> None:
    sources = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    sources += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "formats").rglob("*.md")]
    for source in sources:
        page = site / source.relative_to(ROOT).with_suffix(".html")
        assert page.is_file(), source


def test_its_address_alone_leads_to_the_index(site: Path) -> None:
    (where,) = re.findall(r'url=([^"]+)"', (site / "index.html").read_text())
    assert "To learn from" in (site / where).read_text()


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "name", ["index", "quickstart", "performance", "api", "notebooks/looking-at-a-store"]
)
def test_a_browser_shows_a_page_and_asks_no_host(site: Path, tmp_path: Path, name: str) -> None:
    page = site / f"docs/{name}.html"
    elements, asked = seen(page, tmp_path)
    text = page.read_text()
    assert not {url for url in asked if str(urlsplit(url).hostname) in text}
    (title,) = re.findall(r"<h1>(.*?)<a", text)
    assert title in elements


def test_notebooks_are_pages_with_their_cells_and_the_file(site: Path) -> None:
    names = [path.stem for path in (ROOT / "docs/notebooks").glob("*.ipynb")]
    assert names
    for name in names:
        page = (site / f"docs/notebooks/{name}.html").read_text()
        assert page.count('class="highlight-python') >= 4, name
        (file,) = re.findall(r'href="([^"]+\.ipynb)"', page.partition("download")[2].partition("</p>")[0])
        assert (site / "docs/notebooks" / file).is_file(), name
        assert f"notebooks/{name}.html" in (site / "docs/index.html").read_text()


def test_every_option_of_the_command_is_told(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "docs/cli.html").read_text()))
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        told = page.partition(f"\n{name}¶")[2] or page.partition(f"\n{name}#")[2]
        section = re.split(r"\n[a-z-]+[¶#]\n", told)[0]
        options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        missing = {one for one in options - {"--debug", "--help"} if one.startswith("--")}
        assert {one for one in missing if one not in section} == set(), name


def test_every_option_of_a_loader_is_told_and_nothing_of_the_inside(site: Path) -> None:
    page = (site / "docs/api.html").read_text()
    options = re.sub(r"<[^>]+>", "", page.partition("LoaderOptions")[2])
    for option in LoaderOptions.__annotations__:
        assert re.search(rf"\b{option}\b", options), option
    names = set(re.findall(r'id="(featstore\.[^"]+)"', page))
    assert "featstore.loaders.report.LoaderReport.hit_rate" in names
    assert not {f"featstore.Request.{one}" for one in ("begin", "answer", "close_piece")} & names
    assert "featstore.Hosts.as_source" not in names


def test_every_public_name_and_error_has_its_entry(site: Path) -> None:
    page = (site / "docs/api.html").read_text()
    for name in featstore.__all__:
        if not name.startswith("__"):
            assert f'id="featstore.{name}"' in page, name
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            assert f'id="featstore.errors.{name}"' in page, name


def test_a_parameter_is_told_as_one(site: Path) -> None:
    """Docstrings become lists of parameters, not paragraphs that run into each other."""
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "docs/api.html").read_text()))
    assert re.search(r"Parameters:\s+out\s+–\s+the store's directory", page) or re.search(
        r"Parameters:\s+out.{0,40}–\s+the store.s directory", page
    )


def test_no_page_asks_the_network_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        found = re.findall(r"""<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=["'](https?:[^"']+)""", text)
        assert not found, f"{page.name}: {found}"
