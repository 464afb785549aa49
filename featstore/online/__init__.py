"""Online reading: rows of mini-batches that are not known beforehand pass through one feature buffer."""
