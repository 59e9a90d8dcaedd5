"""Algorithm 1: the loop, its two sides, batches, updates, metrics, sharded weights."""
