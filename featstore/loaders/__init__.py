"""What is read when: as mini-batches come, as recorded, an episode ahead, by partitions."""
