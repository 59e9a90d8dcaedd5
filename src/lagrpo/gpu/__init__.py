"""Triton kernels for a GPU, attention to a cache, and CUDA graphs."""
