"""Checkpoints, and what may change between the start of a run and its resumption."""
