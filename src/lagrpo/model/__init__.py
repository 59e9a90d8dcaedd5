"""The policy π: its weights, the model that computes by them, its chat, and its files."""
