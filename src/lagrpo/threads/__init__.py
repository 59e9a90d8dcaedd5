"""The CPU threads of this process: how many, how they wait for each other, and what to do when others need the cores.

waiting.py  the wait policy of OpenMP    cores.py     cores, affinity, the container's quota
readings.py what the system says         adapting.py  from readings to a number
team.py     the threads of this process: where the number is set

`import lagrpo` loads this file and waiting.py alone, both without PyTorch.
"""
