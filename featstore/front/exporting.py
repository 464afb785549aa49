"""``featstore.export``."""

from __future__ import annotations

from featstore.exporting.export import export_table as export

__all__ = ["export"]
