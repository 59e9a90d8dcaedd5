"""The CPU threads of this process: how many compute, how they wait, what happens when other programs need the cores.

`import lagrpo` loads this file and waiting.py alone, both without PyTorch.
"""
