"""Ranks: how processes find each other, share a batch out and bring it together again."""
