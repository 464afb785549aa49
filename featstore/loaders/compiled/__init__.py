"""Mini-batches that are known beforehand, read from what was compiled for them."""
