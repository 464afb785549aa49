"""The site: `sphinx-build -W -c docs . site`. Its pages are the repository's own texts, where they lie, so
that links hold there and here; the API is what docstrings say, the tables of options what the command says,
and a notebook's page its cells."""

import json
from pathlib import Path
from typing import Any

from featstore import __version__

project = "featstore"
author = "the featstore developers"
copyright = author
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**.md", "docs/notebooks/*.ipynb", "formats/**.md"]
exclude_patterns = [".*", "site", "build", "dist"]  # not even looked through, as environments are large
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # a notebook is made one when it is read
html_theme = "furo"
html_title = f"featstore {version}"
html_static_path = ["style"]
html_css_files = ["wide.css"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto"]
suppress_warnings = ["myst.header"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["dgl", "graphlearn_torch", "gigl"]
default_role = "code"

#: The side bar. It is put below the index here, so that the index reads as a page where no site is built.
CONTENTS = {
    "To learn from": [
        "quickstart", "notebooks/from-your-files-to-a-model", "notebooks/looking-at-a-store",
    ],
    "To do with": ["how-to", "coming-from", "using", "hosts", "orders-of-training", "troubleshooting"],
    "To decide": [
        "choosing-a-mode", "memory", "faq", "performance", "What it promises <../README>",
    ],
    "To understand": [
        "concepts", "glossary", "durability", "design", "decisions/README", "architecture",
    ],
    "Reference": [
        "api", "cli", "refused", "../formats/README", "../CHANGELOG", "CONTRIBUTING", "SECURITY",
    ],
}  # fmt: skip
NESTED = {"docs/decisions/README": "[0-9]*", "formats/README": "v1/*"}
#: Of public classes what is for other parts of the package alone.
INTERNAL = {
    "Request": {"begin", "answer", "abandon", "stopped", "open_piece", "close_piece"},
    "Hosts": {"tables_of", "as_source"},
    "Shared": {"tables_of", "as_source"},
    "Reader": {"read_pages"},
    "Trace": {"expect"},
}


def change_page(app: object, page: str, source: list[str]) -> None:
    if page.startswith("docs/notebooks/"):
        source[0] = page_of(json.loads(source[0]), Path(page).name)
    if page == "docs/index":
        for caption, pages in CONTENTS.items():
            source[0] += tree("\n".join(pages), f":caption: {caption}\n")
    elif page == "docs/cli":
        source[0] = with_options(source[0])
    elif page in NESTED:
        source[0] += tree(NESTED[page], ":glob:\n")


def tree(pages: str, option: str) -> str:
    return f"\n\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n{option}\n{pages}\n```\n"


def page_of(notebook: dict[str, Any], name: str) -> str:
    """A notebook's cells as a page, and after its title the file itself."""
    made = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        made.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    made.insert(1, f"To run it yourself, take the notebook: {{download}}`{name}.ipynb`.")
    return "\n\n".join(made)


def with_options(text: str) -> str:
    """The page of the command, with a table of options at the end of each command's section."""
    import click
    from featstore_cli.main import cli

    context = click.Context(cli)
    sections = text.split("\n## ")
    for number, section in enumerate(sections):
        command = cli.get_command(context, section.partition("\n")[0])
        if command is not None:
            sections[number] = section.rstrip() + "\n\n" + options_table(command, context) + "\n"
    return "\n## ".join(sections)


def options_table(command: Any, context: Any) -> str:
    rows = ["| option | what |", "|---|---|"]
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and "--debug" not in record[0]:
            name, what = (cell.replace("|", "\\|") for cell in record)
            rows.append(f"| `{name}` | {what.replace('<', '&lt;').replace('*', chr(92) + '*')} |")
    return "\n".join(rows)


def skip_internal(app: object, what: str, name: str, member: Any, skip: bool, options: object) -> bool | None:
    owner = getattr(getattr(member, "fget", member), "__qualname__", "").split(".")[0]
    return True if name in INTERNAL.get(owner, ()) else None


def write_front(app: Any, error: Exception | None) -> None:
    """What stands where the site's address alone is asked for."""
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "index.html").write_text(
            '<!doctype html><meta charset="utf-8"><title>featstore</title>'
            '<meta http-equiv="refresh" content="0; url=docs/index.html">'
            '<a href="docs/index.html">featstore\'s documentation</a>\n'
        )


def setup(app: Any) -> None:
    app.connect("source-read", change_page)
    app.connect("autodoc-skip-member", skip_internal)
    app.connect("build-finished", write_front)
