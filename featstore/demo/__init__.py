"""Demo: what ``featstore demo`` runs. A graph is made up or loaded, packed, and a GraphSAGE trained on it twice: with
rows from the store under a small memory budget, and with all rows in memory. Every loss must be the same bits in
both."""

from featstore.demo.report import DemoReport, RunReport, render
from featstore.demo.runner import run

__all__ = ["DemoReport", "RunReport", "render", "run"]
