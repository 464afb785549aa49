"""Mini-batches that are not known beforehand."""
