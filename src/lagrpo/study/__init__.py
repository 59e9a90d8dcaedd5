"""`lagrpo study`: makes the runs of a grid over seeds, and tests claims about them.

docs/studies.md has more.
"""
