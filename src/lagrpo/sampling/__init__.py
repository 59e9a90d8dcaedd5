"""The sampler α: its protocol, the in-process sampler, delivery and the schedule."""
