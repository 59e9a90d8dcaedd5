"""What a batch is made of: prompts, and pre-generated (offline) completions."""
