"""Demo: what ``featstore demo`` runs. A graph is made up or loaded, packed, and a GraphSAGE trained on it
twice: with rows from the store under a small memory budget, and with all rows in memory. Every loss must be
the same bits in both. Or, in mode ``mega``, it is trained by mega-batches, whose losses are others, and held
against training in memory."""

from featstore_demo.mega import run_mega
from featstore_demo.mega_report import MegaReport, MegaRunReport, render_mega
from featstore_demo.report import DemoReport, RunReport, render
from featstore_demo.runner import run

__all__ = [
    "DemoReport",
    "MegaReport",
    "MegaRunReport",
    "RunReport",
    "render",
    "render_mega",
    "run",
    "run_mega",
]
