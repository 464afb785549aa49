"""The machine and plain data: memory, files, threads, numbers. Knows nothing of a store."""
