"""From settings to the two sides of a run: arguments, checks, what builds and explains them."""
