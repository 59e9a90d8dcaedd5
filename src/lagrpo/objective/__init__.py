"""From names to functions: the pieces of core composed to an objective, the recipes as one table."""
