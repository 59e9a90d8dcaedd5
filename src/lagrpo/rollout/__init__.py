"""The sampler α: its protocol, the in-process sampler, weight sync and the schedule."""
