"""What computes on a device: attention, log-probs, the C kernels of CPUs, and what a process sets for them."""
