"""The C kernels of CPUs, and the layers, packed weights and steps that run on them."""
