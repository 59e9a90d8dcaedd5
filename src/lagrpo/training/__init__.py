"""Algorithm 1 and what stands around it: from settings to its parts, checks, metrics, evaluation."""
