"""The site: `sphinx-build -W -c docs . site`. Its pages are the repository's own texts, where they lie, so
that links hold there and here; the API is what docstrings say."""

from featstore import __version__

project = "featstore"
author = "the featstore developers"
copyright = author
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**.md", "formats/**.md"]
html_theme = "furo"
html_title = f"featstore {version}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto"]
suppress_warnings = ["myst.header"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"

#: The side bar. It is put below the index here, so that the index reads as a page where no site is built.
CONTENTS = {
    "Begin here": ["quickstart", "choosing-a-mode", "coming-from", "glossary"],
    "While you work": ["how-to", "memory", "troubleshooting", "cli", "api", "hosts", "orders-of-training"],
    "Before you decide": ["What it promises <../README>", "faq", "performance", "refused"],
    "How it is made": [
        "design", "architecture", "decisions/README", "../formats/README", "CONTRIBUTING", "SECURITY",
        "../CHANGELOG",
    ],
}  # fmt: skip
NESTED = {"docs/decisions/README": "[0-9]*", "formats/README": "v1/*"}


def add_contents(app: object, page: str, source: list[str]) -> None:
    if page == "docs/index":
        for caption, pages in CONTENTS.items():
            source[0] += tree("\n".join(pages), f":caption: {caption}\n")
    elif page in NESTED:
        source[0] += tree(NESTED[page], ":glob:\n")


def tree(pages: str, option: str) -> str:
    return f"\n\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n{option}\n{pages}\n```\n"


def setup(app: object) -> None:
    app.connect("source-read", add_contents)  # type: ignore[attr-defined]
