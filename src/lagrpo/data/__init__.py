"""The data of batches: prompts, and pre-generated (offline) completions."""
