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
