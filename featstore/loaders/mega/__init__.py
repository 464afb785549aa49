"""Random collections of partitions, loaded whole."""
