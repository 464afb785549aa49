"""Compiled traces: mini-batches known beforehand, their rows laid out for exactly them (after DiskGNN, SIGMOD 2025)."""
