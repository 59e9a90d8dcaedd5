"""Toys whose numbers are exact: bandits, and how figures look."""
