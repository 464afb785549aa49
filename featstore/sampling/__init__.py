"""Mini-batches: neighbour samplers, in memory and from the store, and orders of training nodes."""
