"""The C kernels of a CPU: compiled, called, and put together to decoder layers."""
