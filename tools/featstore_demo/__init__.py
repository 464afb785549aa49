"""Demo: what ``featstore demo`` runs. A graph is made up or loaded, packed, and a GraphSAGE trained on it in
every way, by one loop: with all rows in memory, by np.memmap and by each mode of the store's loader within a
small memory. Where mini-batches are the same, every loss must be the same bits."""

from featstore_demo.report import WAYS, DemoReport, Way, render
from featstore_demo.runner import run

__all__ = ["WAYS", "DemoReport", "Way", "render", "run"]
