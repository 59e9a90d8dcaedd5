"""A run from start to end: training, evaluations, records, resuming."""
