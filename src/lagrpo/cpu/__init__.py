"""The C kernels of a CPU: how they are compiled, called, and put together to decoder layers. Imports no other room."""
