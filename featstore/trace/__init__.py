"""Recorded mini-batches."""
