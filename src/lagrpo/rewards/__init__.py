"""Reward functions: the signatures that users know, built-in rewards, and the worker processes that call them."""
