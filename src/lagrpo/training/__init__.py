"""Algorithm 1 and what stands around it: its parts, checks, metrics, evaluation."""
