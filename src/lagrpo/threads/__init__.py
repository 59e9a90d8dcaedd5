"""The CPU threads of this process: how many compute, how they wait for each other, and what happens when other programs
need the cores.

waiting.py  the wait policy of OpenMP    cores.py     cores, affinity, the container's quota
readings.py what the system reports         adapting.py  decides the number from readings
team.py     sets the number

`import lagrpo` loads this file and waiting.py alone, both without PyTorch.
"""
