"""Leaving: rows of a table in the user's order, as files that other programs read."""
