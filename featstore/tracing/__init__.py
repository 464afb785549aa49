"""Recording mini-batches: the log's layout, who finds their node ids, who writes, who samples from a store."""
