"""The version, where every layer may see it."""

__version__ = "0.1.0"
