"""Layout: in which file, at which byte, is this row?"""

from featstore.layout.table import TableLayout

__all__ = ["TableLayout"]
