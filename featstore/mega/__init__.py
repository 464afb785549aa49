"""Training by locality: random collections of partitions, loaded one after the other (HierBatching)."""
