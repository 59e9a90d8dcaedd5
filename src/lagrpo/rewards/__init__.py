"""Reward functions: their signatures, built-in rewards, and the workers that call them."""
